"""Calls as ops, with their FLOPs and what autograd keeps for their backward."""

from meshwright.ir.graph.flops import flops
from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.saved import Memory
from meshwright.ir.trace.flat_trace import Raw


def costed(raw: Raw) -> list[Op]:
    """The final ops, with flops and what autograd keeps; views count as what they are views of."""
    memory = Memory()
    owner: dict[str, str] = {}
    done: list[Op] = []
    for op in raw.ops:
        kept = memory.of(op, raw.fakes)
        inputs = op.inputs
        for output, shared in zip(op.outputs, kept.shares, strict=True):
            if output and shared is not None:
                owner[output] = owner.get(inputs[shared], inputs[shared])
        names = [inputs[i] for i in kept.inputs] + [op.outputs[i] for i in kept.outputs]
        done.append(Op(
            name=next(filter(None, op.outputs), "") or f"{op.name.split('.')[1]}_{len(done)}",
            key="",
            target=op.name,
            args=tuple(op.args.items()),
            inputs=inputs,
            outputs=tuple(op.outputs),
            module_path=op.path,
            flops=flops(op.name, op.args, raw.fakes, op.outputs),
            saved=tuple(dict.fromkeys(owner.get(n, n) for n in names)),
            saved_extra_bytes=kept.extra_bytes,
            source=op.source,
        ))  # fmt: skip
    return done
