"""What is pinned for single parameters: `parameters wte.weight zero=0,sync=dear`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import cast

from meshwright.forms import storage, sync
from meshwright.forms.updates import UPDATES
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.plan.parameters import choice_of
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Stage, Zero

KEYS = ("store", "sync", "update", "zero")


@dataclass(frozen=True, slots=True)
class ParametersAs:
    """Parameters whose module paths match, and what is done with them in every stage."""

    pattern: str
    said: tuple[tuple[str, str], ...]
    """Of `KEYS`, ascending: what is not named is as in `ParameterChoice`; if nothing but `update`
    is, the rest is free."""

    def __str__(self) -> str:
        return f"parameters {self.pattern} {','.join(f'{key}={value}' for key, value in self.said)}"

    @property
    def choice(self) -> ParameterChoice:
        """The same as a stage of a plan says it."""
        said = dict(self.said)
        sync, store = (FormChoice(form=said[k]) if k in said else None for k in ("sync", "store"))
        zero = cast(Zero, int(said.get("zero", 0)))
        return ParameterChoice(zero=zero, sync=sync, store=store, update=said.get("update", ""))

    def apply(self, graph: Graph, blocks: Sequence[Block], stage: Stage) -> Stage:
        """Returns a stage that runs these blocks with what is said, if it has such parameters."""
        if not self.named(paths_of(graph, blocks)):
            return stage
        return replace(stage, by_parameter={**stage.by_parameter, self.pattern: self.choice})

    def holds(self, plan: Plan, graph: Graph) -> bool:
        """Whether a plan keeps it."""
        return all(
            self._is(choice_of(stage.by_parameter, path))
            for index, stage in enumerate(plan.stages)
            for path in self.named(paths_of(graph, plan.stage_blocks(graph, index)))
        )

    def _is(self, choice: ParameterChoice | None) -> bool:
        if [key for key, _ in self.said] == ["update"]:
            return choice is not None and choice.update == self.choice.update
        return choice == self.choice

    def check(self, graph: Graph) -> None:
        """PlanError if it names no parameter of the model, or what cannot be."""
        known = paths_of(graph, graph.blocks)
        if not self.named(known):
            near = nearest(self.pattern, known)
            raise PlanError(f"constraint '{self}': no such parameter; nearest is {near!r}")

    def named(self, paths: Iterable[str]) -> list[str]:
        """Returns those of the paths that it names."""
        return [p for p in paths if p == self.pattern or fnmatchcase(p, self.pattern)]


def paths_of(graph: Graph, blocks: Iterable[Block]) -> list[str]:
    """Returns the module paths of the parameters that blocks read, each once."""
    names = dict.fromkeys(name for block in blocks for name in block.params)
    tensors = [graph.tensors[name] for name in names]
    return [tensor.fqn for tensor in tensors if tensor.kind is Kind.PARAMETER]


def parse_parameters(text: str, pattern: str, values: str) -> ParametersAs:
    """Reads KEY=VALUE,...; PlanError with the nearest legal key or value."""
    said: dict[str, str] = {}
    for part in values.split(","):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if key not in KEYS or key in said:
            why = "is said twice" if key in said else f"is none; nearest is {nearest(key, KEYS)!r}"
            raise PlanError(f"constraint {text!r}: {key!r} {why}; write KEY=VALUE,KEY=VALUE")
        legal = _legal(key)
        if not sign or value not in legal:
            near = nearest(value, legal)
            message = f"{key} must be {' or '.join(legal) or 'left out: there are none'}"
            raise PlanError(
                f"constraint {text!r}: {message}" + (f"; nearest is {near!r}" if near else "")
            )
        said[key] = value
    if "sync" in said and not sync.suits(said["sync"], int(said.get("zero", 0))):
        fits = [str(n) for n in range(4) if sync.suits(said["sync"], n)]
        raise PlanError(
            f"constraint {text!r}: sync={said['sync']} goes with zero={' or zero='.join(fits)}"
        )
    return ParametersAs(pattern, tuple(sorted(said.items())))


def _legal(key: str) -> tuple[str, ...]:
    match key:
        case "zero":
            return ("0", "1", "2", "3")
        case "sync":
            return sync.pinnable()
        case "store":
            return storage.for_stages()
        case _:
            return tuple(UPDATES)
