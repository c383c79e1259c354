"""Puts fused kernels in the place of the operators that they stand for."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.costed import costed
from meshwright.ir.graph.graph import Fusion, Kind, Missed, Op, Ref, Tensor
from meshwright.ir.graph.images import is_channels_last
from meshwright.ir.graph.saved import call
from meshwright.ir.kernels import check_kernels, is_placed, load
from meshwright.ir.launch import held_dtype
from meshwright.ir.trace.flat_trace import Raw, RawOp, dtype_name
from meshwright.ir.trace.flow import Flow, Match, Miss
from meshwright.ir.trace.simplify import drop_dead


class Wins(Protocol):
    """Whether a fused op, with what it needs before it, is worth what it replaces: "" if so, else
    why not."""

    def __call__(
        self, before: Sequence[Op], after: Sequence[Op], tensors: Mapping[str, Tensor]
    ) -> str: ...


CAST = "aten.to.dtype"
Decide = Callable[[str, str, Match], str]
"""Of a kernel, a place and what was found there: "" if it is put in, else why not."""


def fuse(
    raw: Raw, kernels: Sequence[str | Fusion], wins: Wins | None = None
) -> tuple[Raw, tuple[Fusion, ...]]:
    """The step with the kernels named wherever their patterns hold, and what came of each.

    Kernels are tried in turn: a call belongs to the first that takes it. Those of a plan are put
    in as they were when it was made, whatever their price is now.
    """
    if isinstance(kernels, str):
        raise PlanError(f"kernels is {kernels!r}; write the names in a list, such as [{kernels!r}]")
    names = check_kernels([k.kernel if isinstance(k, Fusion) else k for k in kernels])
    priced = {k.kernel for k in kernels if isinstance(k, Fusion) and k.priced}
    priced |= set(names) if wins else set()
    patterns = {name: load(name) for name in names if not is_placed(name)}
    decide = _decide(raw, [k for k in kernels if isinstance(k, Fusion)], wins)
    found = {
        name: _fuse_one(raw, patterns[name], name, decide)
        for name in sorted(patterns, key=lambda name: len(getattr(patterns[name], "AFTER", ())))
    }
    # The places of the others are known once there is a plan.
    made = (found.get(name, Fusion(name, 0)) for name in names)
    return raw, tuple(replace(fusion, priced=fusion.kernel in priced) for fusion in made)


def _decide(raw: Raw, made: Sequence[Fusion], wins: Wins | None) -> Decide:
    declined = {(f.kernel, m.where): m.why for f in made for m in f.missed if m.declined}

    def decide(name: str, place: str, match: Match) -> str:
        if made or wins is None:
            return declined.get((name, place), "")
        return wins(*_as_ops(raw, match))

    return decide


def _fuse_one(raw: Raw, pattern: ModuleType, name: str, decide: Decide) -> Fusion:
    flow = Flow.of(raw)
    missed: Counter[Missed] = Counter()
    found: dict[int, Match] = {}
    at: dict[str, list[Match]] = {}
    for op in raw.ops:
        match = pattern.find(flow, op) if op.name in pattern.ANCHORS else None
        if isinstance(match, Match):
            match = _admitted(flow, match, found)
        if isinstance(match, Miss):
            missed[Missed(_place(op), match.why, 0)] += 1
        elif match:
            found |= {id(inner): match for inner in match.replaced}
            at.setdefault(_place(op), []).append(match)
    for place, matches in at.items():
        # All alike: a plan names places without the numbers of layers.
        if why := next(filter(None, (decide(name, place, match) for match in matches)), ""):
            missed[Missed(place, why, 0, declined=True)] = len(matches)
            found = {key: match for key, match in found.items() if match not in matches}
    places = list({id(match): match for match in found.values()}.values())
    _substitute(raw, places, found)
    whys = sorted(missed, key=lambda m: (m.where, m.why))
    return Fusion(name, len(places), tuple(replace(m, places=missed[m]) for m in whys))


def _place(op: RawOp) -> str:
    """The module, with the numbers of layers left out."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", op.path) or "the step"


def _admitted(flow: Flow, match: Match, taken: dict[int, Match]) -> Match | Miss:
    """The match, unless something else needs what would no longer be made."""
    if any(id(op) in taken for op in match.replaced):
        return Miss("an operator belongs to another place")
    match = _with_cast(flow, match)
    # A cast of what goes in may stay for others: the kernel reads what was cast.
    stay = {id(op) for op in match.replaced if op.name == CAST and _read_elsewhere(flow, match, op)}
    match = replace(match, replaced=tuple(op for op in match.replaced if id(op) not in stay))
    for op in match.replaced:
        if _read_elsewhere(flow, match, op):
            return Miss(f"{op.name} is read elsewhere too")
    why = _changed_type(flow, match)
    return Miss(why) if why else match


def _with_cast(flow: Flow, match: Match) -> Match:
    """The match with casts after it to what the kernel makes anyway, where nobody else reads what
    is cast: the kernel computes as wide as that, and rounds once."""
    fakes, names, casts = flow.raw.fakes, list(match.op.outputs), []
    for i, made in enumerate(call(match.op, fakes)):
        readers = flow.readers.get(names[i], [])
        if len(readers) != 1 or readers[0].name != CAST or names[i] == flow.raw.loss:
            continue
        (cast,), before = readers, fakes[names[i]].dtype
        rounds = made.dtype != before == held_dtype(made.dtype)
        if rounds and fakes[cast.outputs[0]].dtype == made.dtype:
            names[i] = cast.outputs[0]
            casts.append(cast)
    if not casts:
        return match
    return replace(match, replaced=(*match.replaced, *casts), op=replace(match.op, outputs=names))


def _read_elsewhere(flow: Flow, match: Match, op: RawOp) -> bool:
    """Whether others need what the kernel would no longer make."""
    inside = {id(inner) for inner in match.replaced}
    return any(
        name == flow.raw.loss or any(id(user) not in inside for user in flow.readers[name])
        for name in set(op.outputs) - set(match.op.outputs)
    )


def _changed_type(flow: Flow, match: Match) -> str:
    """What is wrong if the kernel makes values of other shapes or dtypes."""
    for name, made in zip(match.op.outputs, call(match.op, flow.raw.fakes), strict=True):
        before = flow.raw.fakes.get(name)
        if before is not None and (before.shape, before.dtype) != (made.shape, made.dtype):
            return f"its result is {before.dtype}, the kernel's is {made.dtype}"
    return ""


def _as_ops(raw: Raw, match: Match) -> tuple[list[Op], list[Op], dict[str, Tensor]]:
    """What is replaced, what comes instead, the fused op last, and all tensors of both."""
    names = [name or f"statistics_{i}" for i, name in enumerate(match.op.outputs)]
    after = [*match.before, replace(match.op, outputs=names)]
    fakes = raw.fakes | dict(zip(names, call(after[-1], raw.fakes), strict=True))
    replaced = [op for op in match.replaced if not _changes_nothing(op, fakes)]
    ops = costed(Raw([*replaced, *after], raw.tensors, fakes))
    tensors = {
        name: raw.tensors.get(name) or Tensor(
            name, tuple(fakes[name].shape), dtype_name(fakes[name].dtype), Kind.ACTIVATION,
            requires_grad=raw.fakes[name].requires_grad if name in raw.fakes else False,
            channels_last=is_channels_last(fakes[name]),
        )
        for op in ops for name in (*op.inputs, *op.outputs) if name
    }  # fmt: skip
    return ops[: -len(after)], ops[-len(after) :], tensors


def _changes_nothing(op: RawOp, fakes: Mapping[str, Any]) -> bool:
    """Whether it is a cast to what its operand is, which takes no time."""
    read = op.args["self"] if op.name == CAST else None
    return isinstance(read, Ref) and fakes[read.name].dtype == fakes[op.outputs[0]].dtype


def _substitute(raw: Raw, places: Sequence[Match], inside: dict[int, Match]) -> None:
    if not places:
        return
    at = {id(match.at): match for match in places}
    raw.ops = list(_merged(raw, at, inside))
    drop_dead(raw)


def _merged(raw: Raw, at: dict[int, Match], inside: dict[int, Match]) -> Iterator[RawOp]:
    for op in raw.ops:
        if match := at.get(id(op)):
            yield from match.before
            yield _added(raw, match)
        elif id(op) not in inside:
            yield op


def _added(raw: Raw, match: Match) -> RawOp:
    """The fused call, with examples of what it makes; results that had no name get one."""
    values = call(match.op, raw.fakes)
    names = [name or raw.fresh("statistics") for name in match.op.outputs]
    for name, value in zip(names, values, strict=True):
        before = raw.fakes.get(name)
        wanted = before is not None and before.requires_grad
        raw.fakes[name] = value.detach().requires_grad_(wanted)
    return replace(match.op, outputs=names)
