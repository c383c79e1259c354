"""What routing of tokens is priced at, against the operators that really run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.routing import routed_experts
from meshwright.costmodel.ops.compute import OpTime, formula
from meshwright.costmodel.ops.expert_passes import as_multiplied_by, passes_beside
from meshwright.costmodel.ops.kernel_work import forward_work, input_work, weight_work
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.narrow_tokens import casting
from meshwright.costmodel.ops.routing import FINDING, RoutedTokens, on_busiest, routed
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.cluster.launching import Casting
from meshwright.ir.graph import grouped, narrow_tokens
from meshwright.ir.graph.experts import experts_backward, experts_forward
from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.routing import Routing
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.op_messages import LocalOperand
from meshwright.ir.ops import facts
from meshwright.ir.precision import precision
from meshwright.ir.styles import style
from meshwright.runtime.profiling.free_lines import FreeLine
from meshwright.testing.spawn import alone

WIDTH, EXPERTS, INNER, RANKS = 256, 4, 3, 2
PAIRS = torch.tensor([(a, b) for a in range(EXPERTS) for b in range(EXPERTS)])
"""Of experts, each once: balanced."""
ALL_PAIRS = Routing(
    experts=EXPERTS, picked=2, ranks=(1, 2, 4), reached=(1.0, 1.5, 1.75), arrived=(1.0,) * 3,
    worked=(1.0,) * 3,
)  # fmt: skip
"""A token may pick an expert twice here."""
TARGET = "meshwright.experts.default"
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


def counted(
    dtype: torch.dtype, kernels: frozenset[str], autocast: bool = False
) -> list[tuple[Counts, Counts]]:
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
        with forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            made = routed_experts(
                comm, hidden, PAIRS, weights, axis="ep", experts=(2, 2), gate_up=up, down=down,
                act="silu",
            )  # fmt: skip
        with backward:
            made.backward(torch.ones_like(made))
        return tuple((one.nbytes, one.moves, one.small) for one in (forward, backward))

    return [body(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "products"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_priced_as_it_runs(dtype, products, by_kernel):
    """Under autocast, which has others for its products, tokens travel as wide as they are."""
    kernels = frozenset({"route"}) if by_kernel else frozenset[str]()
    found = alone(counted, getattr(torch, dtype), kernels, products != dtype)
    width = getattr(torch, dtype).itemsize
    tokens, picked = (
        LocalInput((len(PAIRS), n), len(PAIRS) * n * size, trained, False)
        for n, size, trained in ((WIDTH, width, True), (2, 8, False))
    )
    weights = LocalInput((len(PAIRS), 2), len(PAIRS) * 2 * width, True, False)
    op = LocalOp(
        TARGET, OpClass.MATMUL, products, 0.0, (tokens, picked, weights),
        (tokens.shape,), tokens.nbytes, True,
    )  # fmt: skip
    time = routed(RoutedTokens("experts", op, ALL_PAIRS, RANKS), DEVICE, by_kernel)
    for (nbytes, moves, others), (back_nbytes, back_moves, _) in found:
        assert time.forward_s * RATE == pytest.approx(nbytes, rel=0.02)
        assert time.backward_input_s * RATE == pytest.approx(back_nbytes, rel=0.02)
        assert time.forward_dispatch_s / DISPATCH_S == pytest.approx(moves + FINDING)
        assert time.input_dispatch_s / DISPATCH_S == pytest.approx(back_moves)
        assert others == FINDING
    assert time.source == DEVICE.source and time.band > 0


class MovedTokens(TorchDispatchMode):
    """Bytes of tokens that operators read and write: views of a packed row count as such."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not any(other in str(func) for other in (*OTHERS, "empty")):
            given = args[1:] if "copy_" in str(func) and "_to" not in str(func) else args
            self.nbytes += sum(x.nbytes for x in tree_leaves((given, made)) if _is_wide(x))
        return made


def _is_wide(x: object) -> bool:
    return isinstance(x, Tensor) and x.shape[-1] == WIDTH


def test_casts_of_tokens_are_priced_as_they_run() -> None:
    """For a way forward, and one of gradients; or rounded where they are read, in a backward both
    of them. Other layers cast none."""
    cpu = replace(DEVICE, kind="cpu")
    tokens, form = LocalInput((1024, WIDTH), 2048 * WIDTH, True, False), "narrow_tokens"
    local = LocalOp(TARGET, OpClass.MATMUL, "bfloat16", 0.0, (tokens,) * 3, (tokens.shape,),
                    tokens.nbytes, True)  # fmt: skip
    op = Op("experts", "experts", TARGET, (("form", form),), (), (), "")
    rows = torch.ones(1024, WIDTH, dtype=torch.bfloat16)
    with MovedTokens() as moved:
        narrow_tokens.rounded(rows)
    for sent, forward, backward in ((None, 1, 2), (2.5, 2.5, 2.5)):
        time = casting(op, local, cpu, sent)
        assert time is not None
        assert time.forward_s * RATE == pytest.approx(forward * moved.nbytes, rel=0.01)
        assert time.backward_input_s * RATE == pytest.approx(backward * moved.nbytes, rel=0.01)
    assert casting(replace(op, args=()), local, cpu, None) is None


def test_experts_on_two_axes_are_told_of_the_ranks_of_both() -> None:
    """Inside of two parts of the experts, on an axis of two ranks."""
    known = replace(ALL_PAIRS, arrived=(1.0, 1.25, 1.75), worked=(1.0, 1.5, 2.0))
    shapes = (8, 16), (8, 2), (8, 2), (EXPERTS, 6, 16), (EXPERTS, 16, 3)
    names = [f"x{i}" for i in range(len(shapes))]
    op = Op("experts", "experts", TARGET, (), tuple(names), ("y",), "", routing=known)
    inner = Shard(0, 2)
    strategy = Strategy((inner,) * 5, (inner,))
    found = facts(TARGET)
    assert found.busiest and found.messages and found.copies
    assert found.busiest(op, strategy, 2, shapes[0]) == pytest.approx(2.0 / 1.5)
    assert found.busiest(op, Strategy((Shard(0),) * 5, (Shard(0),)), 2, shapes[0]) == 1.5
    inputs = [LocalOperand(shape, 4096) for shape in shapes]
    inputs[3] = LocalOperand((EXPERTS // 2, 6, 16), 4096)
    _, rows, *_ = found.messages(op, strategy, 2, inputs, inputs[:1])
    assert rows.nbytes == 4096 * 1.75 and rows.crowd == 1.75 and rows.outer == 2
    assert found.copies(op, strategy, 2, inputs, inputs[:1])[0] == 4096 * 1.75 * 1.75 / 2

    tokens = LocalInput((8, 16), 2**20, True, False)
    local = LocalOp(TARGET, OpClass.MATMUL, "float32", 0.0, (tokens,) * 3, ((8, 16),),
                    2**20, True)  # fmt: skip
    crowded, mean = (
        routed(RoutedTokens("experts", local, one, 2, 2), DEVICE, by_kernel=True)
        for one in (known, ALL_PAIRS)
    )
    assert crowded.total_s == pytest.approx(1.25 * mean.total_s)


def test_measured_experts_have_the_load_of_the_busiest_rank() -> None:
    """A measurement knows shapes alone; a formula has been given the work."""
    known = replace(ALL_PAIRS, source="assumed", band=0.25)
    times = [OpTime(1.0, 2.0, 3.0, source, 0.5) for source in ("measured", "interpolated")]
    measured, estimated = (on_busiest(time, 1.5, known) for time in times)
    assert measured == replace(
        times[0], forward_s=1.5, backward_input_s=3.0, backward_weight_s=4.5, band=0.75
    )
    assert estimated == replace(times[1], band=0.75)


def test_passes_of_experts_are_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all that moves rows of pairs beside grouped products, as on a GPU: these are left
    out here. Indices and sums over a few values are not priced."""
    monkeypatch.setattr(grouped, "takes_kernel", lambda *_: True)
    monkeypatch.setattr(grouped, "_by_kernel", _unmade)
    tokens, experts, width, inner = 256, 8, 64, 48
    index = torch.rand(tokens, experts).topk(2).indices
    shapes = (tokens, width), (experts, 2 * inner, width), (experts, width, inner)
    hidden, up, down = (torch.rand(shape, dtype=torch.bfloat16) for shape in shapes)
    biases = [torch.rand(experts, n, dtype=torch.bfloat16) for n in (2 * inner, width)]
    flops = 2.0 * tokens * 2 * 3 * width * inner
    for own in ([], biases):
        given = hidden, index, torch.rand(tokens, 2), up, down, "silu", None, *own
        with Moved() as forward:
            made, product = experts_forward(*given)
        with Moved() as backward:
            experts_backward(made, product, *given)
        sizes = [LocalInput(tuple(x.shape), x.nbytes, i != 1, i > 2)
                 for i, x in enumerate(x for x in given if isinstance(x, Tensor))]  # fmt: skip
        op = LocalOp(TARGET, OpClass.MATMUL, "bfloat16", flops, tuple(sizes),
                     (tuple(hidden.shape),), hidden.nbytes, True)  # fmt: skip
        known = formula(op, DEVICE)
        time = passes_beside(op, known, DEVICE, style(""))
        assert time
        assert time.forward_s * RATE == pytest.approx(forward.nbytes, rel=0.06)
        assert time.backward_input_s * RATE == pytest.approx(backward.nbytes, rel=0.06)
        less = passes_beside(op, known, DEVICE, style("megatron"))
        assert less and less.total_s < time.total_s
        if own:  # counted in Megatron-Core's code: 14 + 4 and 20 + 4 widths, 8 + 3 and 10 + 5
            pairs, each = 2 * 2 * tokens, DEVICE.overhead_s
            assert less.forward_s * RATE == pytest.approx(pairs * (18 * width + 11 * inner))
            both = pairs * (24 * width + 15 * inner)
            assert less.backward_input_s * RATE == pytest.approx(both)
            assert less.forward_dispatch_s == pytest.approx((4 + 6 + 2 * experts) * each)
        measured = replace(known, source="measured")
        assert passes_beside(op, measured, DEVICE, style("")) is None
        # Where a stack has products of 8-bit floats, inputs and gradients of both are cast.
        numbers, casting = precision("fp8-tensorwise"), Casting(operand=4, result=2)
        plain, scaled = (
            Op("experts", "experts", TARGET, (("form", form),), (), (), "")
            for form in ("", "tensorwise")
        )
        narrow = as_multiplied_by(op, scaled, style("megatron"), numbers)
        assert narrow.dtype == numbers.products != op.dtype
        assert as_multiplied_by(op, scaled, style("megatron"), precision("bf16")) == op
        assert as_multiplied_by(op, plain, style("megatron"), numbers) == op
        assert as_multiplied_by(op, scaled, style(""), numbers) == narrow
        more = passes_beside(narrow, known, replace(DEVICE, casting=casting), style("megatron"))
        assert more and [
            (more.forward_s - less.forward_s) * RATE,
            (more.backward_input_s - less.backward_input_s) * RATE,
        ] == pytest.approx([2 * tokens * 4 * (width + inner), 2 * tokens * 2 * (width + 2 * inner)])


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_passes_of_experts_on_a_cpu_are_as_they_run(act: str, gated: bool, biased: bool) -> None:
    """Bytes that operators move of rows of pairs beside products, at the rate of copies but for
    functions of gates, whose rate is half of that here."""
    tokens, experts, width, inner = 256, 8, 64, 48
    index = torch.rand(tokens, experts).topk(2).indices
    columns = inner * (1 + gated)
    shapes = (tokens, width), (experts, columns, width), (experts, width, inner)
    hidden, up, down = (torch.rand(shape) for shape in shapes)
    biases = [torch.rand(experts, n) for n in (columns, width)] if biased else []
    given = hidden, index, torch.rand(tokens, 2), up, down, act, None, *biases
    with RowsMoved(2 * tokens) as forward:
        made, product = experts_forward(*given)
    with RowsMoved(2 * tokens) as backward:
        experts_backward(made, product, *given)
    sizes = [LocalInput(tuple(x.shape), x.nbytes, i != 1, i > 2)
             for i, x in enumerate(x for x in given if isinstance(x, Tensor))]  # fmt: skip
    flops = 2.0 * tokens * 2 * (columns + inner) * width
    op = LocalOp(TARGET, OpClass.MATMUL, "float32", flops, tuple(sizes), (tuple(hidden.shape),),
                 hidden.nbytes, True)  # fmt: skip
    halved = {OpClass.COPY: 1.0, OpClass.TRANSCENDENTAL: 0.5}
    cpu = replace(DEVICE, kind="cpu", overhead_s=0.0, efficiency=halved)
    time = passes_beside(op, formula(op, cpu), cpu, style(""))
    assert time
    assert time.forward_s * RATE == pytest.approx(forward.moved + 2 * forward.curved, rel=0.06)
    both = backward.moved + 2 * backward.curved
    assert time.backward_input_s * RATE == pytest.approx(both, rel=0.06)
    slow = replace(cpu, overhead_s=1e-3)
    more = passes_beside(op, formula(op, slow), slow, style(""))
    assert more and more.total_s > time.total_s + 1e-3 * 10 * experts  # a product for each run


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_products_of_experts_move_what_they_run_on(gated: bool, apart: bool) -> None:
    """What lies between the products is read and written like operands and results of the op."""
    tokens, experts, width, inner = 256, 8, 64, 48
    columns = inner * (1 + (gated and not apart))
    shapes = (tokens, width), (experts, columns, width), (experts, width, inner)
    hidden, first, down = (torch.rand(shape) for shape in shapes)
    up = torch.rand(experts, inner, width) if gated and apart else None
    index = torch.rand(tokens, experts).topk(2).indices
    given = hidden, index, torch.rand(tokens, 2), first, down, "silu", up
    with Multiplied() as forward:
        made, product = experts_forward(*given)
    with Multiplied() as backward:
        experts_backward(made, product, *given)
    sizes = tuple(LocalInput(tuple(x.shape), x.nbytes, i != 1, i > 2)
                  for i, x in enumerate(x for x in given if isinstance(x, Tensor)))  # fmt: skip
    flops = 2.0 * tokens * 2 * (inner * (1 + gated) + inner) * width
    op = LocalOp(TARGET, OpClass.MATMUL, "float32", flops, sizes, (tuple(hidden.shape),),
                 hidden.nbytes, True)  # fmt: skip
    to_tokens, to_weights = input_work(op), weight_work(op)
    assert to_tokens and to_weights
    assert forward_work(op).nbytes == forward.nbytes
    assert to_tokens.nbytes + to_weights.nbytes == backward.nbytes
    # Products of 8-bit floats write two bytes a value.
    narrow = forward_work(op._replace(dtype="float8_e4m3fn"))
    written = 2 * tokens * (inner * (1 + gated) + width)
    assert narrow.nbytes == forward.nbytes // 4 + written


def _unmade(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """What a grouped product would give, not computed."""
    if right.ndim == 2:
        return left.new_empty(len(ends), len(left), right.shape[1])
    return left.new_empty(len(left), right.shape[2])


class Multiplied(TorchDispatchMode):
    """Bytes that products of matrices read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if str(func).startswith("aten.mm"):
            self.nbytes += sum(x.nbytes for x in (*args[:2], made))
        return made


class Moved(TorchDispatchMode):
    """Bytes that operators read and write of values with a row for each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in str(func):
            return made
        rows = [x for x in tree_leaves((args, made)) if isinstance(x, Tensor) and x.ndim > 1]
        if "index_select" in str(func):
            rows = [made, made] if made.ndim > 1 else []
        if "copy_" in str(func):
            rows = rows[:2]
        self.nbytes += sum(x.nbytes for x in rows if x.is_floating_point() and x.numel() > 1024)
        return made


class RowsMoved(TorchDispatchMode):
    """Bytes that operators on a CPU read and write of rows of pairs, of which there are `pairs`."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.pairs, self.moved, self.curved = pairs, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        beside = ("empty", "new_", "mm.", "meshwright", "zeros")
        if func.is_view or name.startswith(beside):
            return made
        if name.startswith("index_add_"):  # a row is read, added to one that is read and written
            self.moved += 3 * args[3].nbytes
        elif name.startswith("index_select"):
            self.moved += 2 * made.nbytes if made.ndim > 1 else 0
        else:
            read = args[:2] if name.startswith("copy_") else (*tree_leaves(args), made)
            rows = [x for x in read if isinstance(x, Tensor) and self._is_of_pairs(x)]
            nbytes = sum(x.nbytes for x in rows)
            if name.startswith(("silu", "gelu")):
                self.curved += nbytes
            else:
                self.moved += nbytes
        return made

    def _is_of_pairs(self, x: Tensor) -> bool:
        return x.is_floating_point() and x.ndim > 1 and len(x) == self.pairs and x.shape[1] > 1
