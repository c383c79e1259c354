"""Moves what depends on no parameter to the front: masks, positions, token counts."""

from dataclasses import replace

from meshwright.ir.graph.graph import Kind
from meshwright.ir.graph.noise import is_random
from meshwright.ir.torch_private import makes_view
from meshwright.ir.trace.flat_trace import Raw, RawOp, substitute
from meshwright.ir.trace.simplify import changes_state


def prelude_first(raw: Raw) -> tuple[Raw, int]:
    """The step with its prelude in front, and how many calls that is.

    The prelude reads no parameter and no buffer that changes. Equal calls in it become one, so that
    layers which each make the same mask read the same value.
    """
    early, late = _divided(raw)
    names: dict[str, str] = {}
    seen: dict[object, RawOp] = {}
    kept: list[RawOp] = []
    for op in early:
        op = _renamed(op, names)
        key = (op.name, op.grad, tuple(op.args.items()))
        if key not in seen or is_random(op.target) or "empty" in op.name:
            seen[key] = op
            kept.append(op)
        else:
            names.update(zip(op.outputs, seen[key].outputs, strict=True))
    raw.ops = kept + [_renamed(op, names) for op in late]
    return raw, len(kept)


def _divided(raw: Raw) -> tuple[list[RawOp], list[RawOp]]:
    memory = _memory(raw)
    changed = {memory.get(n, n) for op in raw.ops if changes_state(raw, op) for n in op.inputs}
    bound = {
        n for n, t in raw.tensors.items()
        if t.kind is Kind.PARAMETER or (t.kind is Kind.BUFFER and n in changed)
    }  # fmt: skip
    early: list[RawOp] = []
    late: list[RawOp] = []
    for op in raw.ops:
        if changes_state(raw, op) or any(n in bound for n in op.inputs):
            bound.update(op.outputs)
            late.append(op)
        else:
            early.append(op)
    return early, late


def _memory(raw: Raw) -> dict[str, str]:
    """View -> the value whose memory it is."""
    found: dict[str, str] = {}
    for op in raw.ops:
        if op.inputs and makes_view(op.target):
            found.update(dict.fromkeys(op.outputs, found.get(op.inputs[0], op.inputs[0])))
    return found


def _renamed(op: RawOp, names: dict[str, str]) -> RawOp:
    return replace(op, args={k: substitute(v, names) for k, v in op.args.items()})
