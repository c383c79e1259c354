"""What becomes of the activations of a stage's blocks, and sequences of that, from which names are
only made when a step is asked for: stages of equal blocks share the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.forms.retention import AGAIN
from meshwright.ir.graph.graph import Block
from meshwright.planner.problem.candidates import StageChoice

Modes = tuple[str, ...]
"""Of blocks of one pattern in order: `full` where they are recomputed, else one of
`planner.problem.saved_modes`; empty where all is kept."""
Step = tuple[Modes, ...]
"""Per group of such blocks."""
Groups = Sequence[Sequence[Block]]


@dataclass(frozen=True, slots=True)
class Treatment:
    """Patterns where all blocks of a stage are meant, else names of blocks."""

    recompute: tuple[str, ...] = ()
    saved: tuple[tuple[str, str], ...] = ()
    """(pattern or name, mode)."""

    @classmethod
    def of(cls, stage: StageChoice) -> "Treatment":
        return cls(stage.recompute, stage.saved)

    @property
    def is_plain(self) -> bool:
        """Whether all is kept."""
        return not (self.recompute or self.saved)


PLAIN = Treatment()


@dataclass(frozen=True, eq=False)
class Ladder:
    """The treatments of the blocks of a stage, by number."""

    groups: Groups
    steps: tuple[Step, ...]
    _made: dict[int, Treatment] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, at: int) -> Treatment:
        at = range(len(self.steps))[at]
        if at not in self._made:
            self._made[at] = named(self.groups, self.steps[at])
        return self._made[at]

    def place(self, treatment: Treatment) -> int:
        """The number of a treatment; 0 for one that is none of them."""
        at = self._places.get(self._step(treatment), 0)
        return at if self[at] == treatment else 0

    @cached_property
    def _places(self) -> dict[Step, int]:
        return {step: at for at, step in enumerate(self.steps)}

    def _step(self, treatment: Treatment) -> Step:
        said = dict.fromkeys(treatment.recompute, AGAIN) | dict(treatment.saved)
        return tuple(
            tuple([said.get(block.name, said.get(block.pattern, "")) for block in group])
            for group in self.groups
        )


def named(groups: Groups, step: Step) -> Treatment:
    """The treatment that gives blocks their modes; a pattern where all of its blocks have one."""
    recompute: list[str] = []
    saved: list[tuple[str, str]] = []
    for group, modes in zip(groups, step, strict=True):
        alike = len(set(modes)) == 1
        said = [(group[0].pattern, modes[0])] if alike else [
            (block.name, mode) for block, mode in zip(group, modes, strict=True) if mode
        ]  # fmt: skip
        recompute += [name for name, mode in said if mode == AGAIN]
        saved += [(name, mode) for name, mode in said if mode not in ("", AGAIN)]
    return Treatment(tuple(recompute), tuple(saved))


def evenly(size: int, count: int, mode: str) -> Modes:
    """So many of the blocks in a mode, as far from each other as can be."""
    return tuple([mode if (i + 1) * count // size > i * count // size else "" for i in range(size)])


def spread_out(size: int, modes: Sequence[str]) -> Iterator[Modes]:
    """All numbers of blocks in each mode, in order of the modes."""
    if not modes:
        yield ("",) * size
        return
    for count in range(size + 1):
        for rest in spread_out(size - count, modes[1:]):
            yield (modes[0],) * count + rest
