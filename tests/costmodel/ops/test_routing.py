"""What routing of tokens is priced at, against the operators that really run."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.routing import routed_experts
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.routing import FINDING, routed
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.runtime.profiling.free_lines import FreeLine
from meshwright.testing.spawn import alone

WIDTH, EXPERTS, INNER, RANKS = 256, 4, 3, 2
PAIRS = torch.tensor([(a, b) for a in range(EXPERTS) for b in range(EXPERTS)])
"""Of experts, each once: balanced."""
RATE, DISPATCH_S = 1e9, 1e-6
DEVICE = DeviceType(
    name="plain", kind="cuda", memory_bytes=2**30, memory_bandwidth_bytes_per_s=RATE,
    peak_flops={"float32": 1e12}, efficiency={OpClass.GATHER: 1.0}, overhead_s=DISPATCH_S,
)  # fmt: skip
MOVES = ("index_select", "index.Tensor", "new_zeros", "_to_copy", "route_")
OTHERS = (
    "experts",
    "view",
    "split",
    "slice",
    "select",
    "detach",
    "alias",
    "cat.",
    "clone",
    "unsqueeze",
)
"""The op itself, views, and copies of what travels, which the links' price has."""


class Counted(TorchDispatchMode):
    """Bytes that operators move which move rows, how many of them and of others there are."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.moves, self.small = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func)
        # Nobody reads what zeros are made like.
        given = () if "zeros" in name else args
        rows = [x for x in tree_leaves((given, made)) if _is_row(x)]
        if "index_add" in name:
            # What is added to is read and written, whatever lies between.
            self.nbytes += 3 * args[3].nbytes
            self.moves += 1
        elif rows and any(move in name for move in MOVES):
            self.nbytes += sum(x.nbytes for x in rows)
            self.moves += 1
        elif not any(other in name for other in OTHERS):
            self.small += 1
        return made


def _is_row(x: object) -> bool:
    """Tokens, weights, or which experts a token picks."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.ndim == 2)


Counts = tuple[int, int, int]


def counted(dtype: torch.dtype, kernels: frozenset[str]) -> list[tuple[Counts, Counts]]:
    """Per rank, of forward and backward.

    One rank after the other in one thread, beside others that send what it sends: operators that
    two threads call for the first time under a dispatch mode have crashed torch.
    """

    def body(rank: int) -> tuple[Counts, Counts]:
        comm = Comm({"ep": FreeLine(RANKS, rank)}, {"ep": RANKS}, {"ep": rank})
        comm.kernels = kernels
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(dtype)

        hidden, weights = (random(len(PAIRS), n).requires_grad_() for n in (WIDTH, 2))
        up = random(EXPERTS // RANKS, 2 * INNER, WIDTH)
        down = random(EXPERTS // RANKS, WIDTH, INNER)
        forward, backward = Counted(), Counted()
        with forward:
            made = routed_experts(
                comm, hidden, PAIRS, weights, axis="ep", experts=(2, 2), gate_up=up, down=down,
                act="silu",
            )  # fmt: skip
        with backward:
            made.backward(torch.ones_like(made))
        return tuple((one.nbytes, one.moves, one.small) for one in (forward, backward))

    return [body(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_priced_as_it_runs(dtype, by_kernel):
    kernels = frozenset({"route"}) if by_kernel else frozenset[str]()
    found = alone(counted, getattr(torch, dtype), kernels)
    width = getattr(torch, dtype).itemsize
    tokens, picked = (
        LocalInput((len(PAIRS), n), len(PAIRS) * n * size, trained, False)
        for n, size, trained in ((WIDTH, width, True), (2, 8, False))
    )
    weights = LocalInput((len(PAIRS), 2), len(PAIRS) * 2 * width, True, False)
    op = LocalOp(
        "meshwright.experts.default", OpClass.MATMUL, dtype, 0.0, (tokens, picked, weights),
        (tokens.shape,), tokens.nbytes, True,
    )  # fmt: skip
    time = routed(op, RANKS, DEVICE, by_kernel)
    for (nbytes, moves, others), (back_nbytes, back_moves, _) in found:
        assert time.forward_s * RATE == pytest.approx(nbytes, rel=0.02)
        assert time.backward_input_s * RATE == pytest.approx(back_nbytes, rel=0.02)
        assert time.forward_dispatch_s / DISPATCH_S == pytest.approx(moves + FINDING)
        assert time.input_dispatch_s / DISPATCH_S == pytest.approx(back_moves)
        assert others == FINDING
    assert time.source == DEVICE.source and time.band > 0
