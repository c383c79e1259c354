"""What a ring moves in memory beside attention itself and its messages, against what is priced."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.codegen.attention.ring import ring_attention
from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.inner_traffic import inner_passes
from meshwright.ir.layout.layout import parse_strategy
from meshwright.ir.layout.op_messages import LocalOperand
from meshwright.testing.simulated import simulate

SAMPLES, HEADS, TOKENS, WIDTH = 2, 4, 256, 32
KERNELS = ("attention", "bmm", "_unsafe_view")
"""Of attention itself, and what moves nothing."""
WRITES = ("zero_", "fill_", "copy_", "zeros", "full")
"""What does not read where it writes."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes that operators read and write, and the operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        self.calls += "attention" in name
        if views or name.startswith(("empty", "new_empty")) or any(k in name for k in KERNELS):
            return out
        if name == "clone" and args[0].ndim == 1:  # a message, which threads hand each other
            return out
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(word in name for word in WRITES):
            read = read[1:] if name in WRITES else []
        self.nbytes += sum(x.numel() * x.element_size() for x in [*read, *made])
        self.calls += 1
        return out


def moved(
    ranks: int, dtype: torch.dtype, groups: int, causal: bool, zigzag: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Bytes and operators of each rank's forward, and of its backward."""
    sections = 2 if zigzag else 1
    sizes = (TOKENS // ranks // sections,) * ranks

    def body(comm: Comm) -> tuple[tuple[int, int], tuple[int, int]]:
        def part(heads: int) -> Tensor:
            made = torch.randn(SAMPLES, TOKENS // ranks, heads, WIDTH).to(dtype)
            return made.transpose(1, 2).requires_grad_()  # as layers make heads of tokens

        q, k, v = part(HEADS), part(groups), part(groups)
        with Traffic() as forward:
            out = ring_attention(
                comm, q, k, v, "cp", sizes, sizes, is_causal=causal, enable_gqa=groups < HEADS,
                sections=(sections, sections), zigzag=zigzag,
            )  # fmt: skip
        grad = torch.randn_like(out)
        with Traffic() as backward:
            torch.autograd.grad(out, (q, k, v), grad)
        return (forward.nbytes, forward.calls), (backward.nbytes, backward.calls)

    found = simulate({"cp": ranks}, body)
    return [x for x, _ in found], [x for _, x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ranks", "groups", "causal", "zigzag"),
    [(2, 4, True, True), (4, 4, True, True), (4, 2, True, True), (4, 4, True, False),
     (2, 4, False, False), (4, 2, False, False)],
)  # fmt: skip
def test_priced_passes_are_those_of_the_ring(
    ranks: int, groups: int, causal: bool, zigzag: bool, dtype: torch.dtype
) -> None:
    forward, backward = moved(ranks, dtype, groups, causal, zigzag)
    item = dtype.itemsize

    def operand(heads: int) -> LocalOperand:
        shape = SAMPLES, heads, TOKENS, WIDTH
        return LocalOperand(shape, prod(shape) * item)

    q, k = operand(HEADS), operand(groups)
    args = ("dropout_p", 0.0), ("is_causal", causal)
    name = "aten.scaled_dot_product_attention.default"
    op = Op("op", "op", name, args, ("q", "k", "v"), ("o",), "")
    place = "S(2,outer=2,zigzag)" if zigzag else "S(2)"
    strategy = parse_strategy(f"{place} {place} {place} -> {place}")
    said = inner_passes(op, strategy, ranks, [q, k, k], [q])
    assert said is not None
    # The busiest rank's; of its kernels one is the operator's own.
    told = (said.forward_bytes, said.forward_calls), (said.backward_bytes, said.backward_calls)
    for (nbytes, calls), ranks_own in zip(told, (forward, backward), strict=True):
        assert nbytes == pytest.approx(max(moved for moved, _ in ranks_own), rel=0.1)
        assert calls + 1 == pytest.approx(max(made for _, made in ranks_own), rel=0.15)
