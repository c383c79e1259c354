"""Puts fused kernels in the place of the operators that they stand for."""

import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Protocol

from meshwright.ir.costed import costed
from meshwright.ir.fusions import check_kernels
from meshwright.ir.fusions.flow import Flow, Match, Miss
from meshwright.ir.graph import Fusion, Kind, Missed, Op, Tensor
from meshwright.ir.raw import Raw, RawOp, dtype_name
from meshwright.ir.saved import call
from meshwright.ir.simplify import drop_dead


class Wins(Protocol):
    """Whether a fused op is worth what it replaces: "" if so, else why not."""

    def __call__(self, before: Sequence[Op], after: Op, tensors: Mapping[str, Tensor]) -> str: ...


def fuse(
    raw: Raw, names: Sequence[str], wins: Wins | None = None
) -> tuple[Raw, tuple[Fusion, ...]]:
    """The step with the kernels named wherever their patterns hold, and what came of each.

    Kernels are tried in turn: a call belongs to the first that takes it.
    """
    return raw, tuple(_fuse_one(raw, _pattern(name), name, wins) for name in check_kernels(names))


def _pattern(name: str) -> ModuleType:
    # Kernels stand above this module; their operators are found by name.
    importlib.import_module("meshwright.codegen.kernels").load()
    return importlib.import_module(f"meshwright.ir.fusions.{name}")


def _fuse_one(raw: Raw, pattern: ModuleType, name: str, wins: Wins | None) -> Fusion:
    flow = Flow.of(raw)
    missed: Counter[tuple[str, str]] = Counter()
    found: dict[int, Match] = {}
    for op in raw.ops:
        match = pattern.find(flow, op) if op.name in pattern.ANCHORS else None
        if isinstance(match, Match):
            match = _admitted(flow, match, found, wins)
        if isinstance(match, Miss):
            missed[_place(op), match.why] += 1
        elif match:
            found |= {id(inner): match for inner in match.replaced}
    places = list({id(match): match for match in found.values()}.values())
    _substitute(raw, places, found)
    return Fusion(
        name, len(places), tuple(Missed(*key, count) for key, count in sorted(missed.items()))
    )


def _place(op: RawOp) -> str:
    """The module, with the numbers of layers left out."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", op.path) or "the step"


def _admitted(flow: Flow, match: Match, taken: dict[int, Match], wins: Wins | None) -> Match | Miss:
    """The match, unless something else needs what would no longer be made, or it does not pay."""
    if any(id(op) in taken for op in match.replaced):
        return Miss("an operator belongs to another place")
    inside = {id(op) for op in match.replaced}
    for op in match.replaced:
        for name in set(op.outputs) - set(match.op.outputs):
            if name == flow.raw.loss or any(id(u) not in inside for u in flow.readers[name]):
                return Miss(f"{op.name} is read elsewhere too")
    changed = _changed_type(flow, match)
    why = changed or (wins(*_as_ops(flow.raw, match)) if wins else "")
    return Miss(why) if why else match


def _changed_type(flow: Flow, match: Match) -> str:
    """What is wrong if the kernel makes values of other shapes or dtypes."""
    for name, made in zip(match.op.outputs, call(match.op, flow.raw.fakes), strict=True):
        before = flow.raw.fakes.get(name)
        if before is not None and (before.shape, before.dtype) != (made.shape, made.dtype):
            return f"its result is {before.dtype}, the kernel's is {made.dtype}"
    return ""


def _as_ops(raw: Raw, match: Match) -> tuple[list[Op], Op, dict[str, Tensor]]:
    """What is replaced, the fused op, and all tensors of both."""
    names = [name or f"statistics_{i}" for i, name in enumerate(match.op.outputs)]
    after = replace(match.op, outputs=names)
    fakes = raw.fakes | dict(zip(names, call(after, raw.fakes), strict=True))
    ops = costed(Raw([*match.replaced, after], raw.tensors, fakes))
    tensors = {
        name: raw.tensors.get(name) or Tensor(
            name, tuple(fakes[name].shape), dtype_name(fakes[name].dtype), Kind.ACTIVATION,
            requires_grad=raw.fakes[name].requires_grad if name in raw.fakes else False,
        )
        for op in ops for name in (*op.inputs, *op.outputs) if name
    }  # fmt: skip
    return ops[:-1], ops[-1], tensors


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
