"""Convolutions and pooling with space split over ranks, against the whole op, both ways."""

import pytest
import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.halo import fetched
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Arg
from meshwright.ir.graph.images import channels_last
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.windows import Window, spans
from meshwright.ir.layout.layout import Axis, parse_strategy
from meshwright.ir.layout.op_messages import SHIFT
from meshwright.testing.simulated import simulate
from meshwright.testing.whole_values import part
from tests.codegen.one_op import Case, check
from tests.codegen.processes import on_gloo
from tests.layouts import Layouts

F64 = torch.float64


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator)


def conv(x: tuple[int, ...], weight: tuple[int, ...], **more: Arg) -> Case:
    dims = len(weight) - 2
    args: dict[str, Arg] = {"stride": (1,) * dims, "padding": (0,) * dims, "dilation": (1,) * dims}
    args |= {"groups": 1} | more
    tensors = {"input": random(*x), "weight": random(*weight), "bias": random(weight[0])}
    variant = "padding" if isinstance(args["padding"], str) else "default"
    return Case(f"aten.conv{dims}d.{variant}", {**tensors, **args})


def pool(kind: str, x: tuple[int, ...], **args: Arg) -> Case:
    given: dict[str, Arg] = {"stride": (), "padding": (0, 0), "ceil_mode": False} | args
    if kind == "max":
        given = {"dilation": (1, 1)} | given
    return Case(f"aten.{kind}_pool2d.default", {"self": random(*x), **given})


CONVS = {
    "3x3": conv((2, 3, 8, 5), (4, 3, 3, 3), padding=(1, 1)),
    "uneven": conv((2, 3, 7, 5), (4, 3, 3, 3), padding=(1, 1)),
    "no padding": conv((1, 2, 9, 4), (3, 2, 3, 3)),
    "stride": conv((1, 2, 9, 4), (3, 2, 3, 3), stride=(2, 2), padding=(1, 1)),
    "stride without overlap": conv((1, 3, 16, 4), (4, 3, 2, 2), stride=(2, 2)),
    "windows with gaps": conv((1, 2, 11, 4), (2, 2, 1, 1), stride=(3, 1)),
    "dilation": conv((1, 2, 12, 4), (2, 2, 3, 1), dilation=(2, 1), padding=(2, 0)),
    "thin parts": conv((1, 2, 4, 4), (2, 2, 7, 3), padding=(3, 1)),
    "same": conv((1, 2, 8, 4), (2, 2, 5, 3), padding="same"),
    "valid": conv((1, 2, 8, 4), (2, 2, 3, 3), padding="valid"),
    "groups": conv((1, 4, 8, 4), (6, 2, 3, 3), padding=(1, 1), groups=2),
    "1d": conv((2, 3, 9), (4, 3, 3), padding=(1,)),
    "3d": conv((1, 2, 6, 3, 3), (2, 2, 3, 3, 3), padding=(1, 1, 1), stride=(1, 2, 1)),
    "one number for all dims": conv((1, 2, 8, 4), (2, 2, 3, 3), padding=(1,), stride=(2,)),
}
POOLS = {
    "max": pool("max", (1, 2, 8, 4), kernel_size=(2, 2)),
    "max, overlap": pool("max", (1, 2, 9, 5), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)),
    "max, ceil": pool("max", (1, 2, 8, 4), kernel_size=(3, 3), stride=(2, 2), ceil_mode=True),
    "max, dilation": pool(
        "max", (1, 2, 9, 5), kernel_size=(2, 2), stride=(1, 1), dilation=(3, 2)
    ),
    "avg": pool("avg", (1, 2, 8, 4), kernel_size=(2, 2)),
    "avg, padding": pool(
        "avg", (1, 2, 8, 4), kernel_size=(3, 3), stride=(1, 1), padding=(1, 1),
        count_include_pad=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CONVS)
def test_convolution(name: str, ranks: int) -> None:
    check(CONVS[name], {"tp": "S(2) R|P R|P -> S(2)"}, {"tp": ranks})


@pytest.mark.parametrize("split", ["S(2) R|P R|P -> S(2)", "R|P S(0) S(0) -> S(1)"])
@pytest.mark.parametrize("name", ["uneven", "3d"])
def test_images_keep_their_channels_innermost(name: str, split: str) -> None:
    """Also with what comes from others beside them, which lies otherwise."""
    args = dict(CONVS[name].args)
    assert isinstance(args["input"], Tensor)
    case = Case(CONVS[name].target, args | {"input": channels_last(args["input"])})
    check(case, {"tp": split}, {"tp": 2})
    parsed = parse_strategy(split)
    made = tuple(operator(case.target)(**case.args).shape)

    def body(comm: Comm) -> list[bool]:
        axis = Axis(2)
        mine = [
            part(x, placement, axis, comm.coordinates["tp"]).contiguous()
            for x, placement in zip(case.tensors, parsed.inputs, strict=True)
        ]
        with Layouts() as layouts:
            case.run(comm, {"tp": parsed}, made, mine, None)
        return [image for image, _ in layouts.seen]

    assert simulate({"tp": 2}, body) == [[True]] * 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str, ranks: int) -> None:
    check(POOLS[name], {"tp": "S(2) -> S(2)"}, {"tp": ranks})


@pytest.mark.parametrize("kernel", [(3, 3), (3, 4), (5, 2)])
def test_both_spatial_dims(kernel: tuple[int, int]) -> None:
    """Corners come in two steps: first along one axis, then along the other."""
    case = conv((2, 2, 7, 9), (3, 2, *kernel), padding=(1, 1))
    split = {"tp_row": "S(2) R|P R|P -> S(2)", "tp_col": "S(3) R|P R|P -> S(3)"}
    check(case, split, {"tp_row": 2, "tp_col": 3})


def test_space_and_channels() -> None:
    case = conv((2, 4, 7, 3), (6, 4, 3, 3), padding=(1, 1))
    columns = {"cp": "S(2) R|P R|P -> S(2)", "tp": "R|P S(0) S(0) -> S(1)"}
    check(case, columns, {"cp": 3, "tp": 2})
    grouped = conv((2, 4, 7, 3), (6, 2, 3, 3), padding=(1, 1), groups=2)
    groups = {"cp": "S(2) R|P R|P -> S(2)", "tp": "S(1) S(0) S(0) -> S(1)"}
    check(grouped, groups, {"cp": 3, "tp": 2})


def test_one_axis_per_dim() -> None:
    case = conv((1, 1, 8, 4), (1, 1, 3, 3))
    text = "S(2) R|P R|P -> S(2)"
    with pytest.raises(PlanError, match="split over cp, tp"):
        check(case, {"cp": text, "tp": text}, {"cp": 2, "tp": 2})


def test_averages_that_differ_at_the_end_are_refused() -> None:
    case = pool(
        "avg", (1, 1, 8, 4), kernel_size=(3, 3), stride=(1, 1), padding=(1, 1),
        count_include_pad=False,
    )  # fmt: skip
    with pytest.raises(PlanError, match="averages"):
        check(case, {"tp": "S(2) -> S(2)"}, {"tp": 2})


Halo = tuple[Tensor, Tensor, list[tuple[str, int]]]
"""What a rank finds, its gradient, and the kind and bytes of what it sends."""


def _halo(comm: Comm) -> Halo:
    """A window of 5 over 7 elements that 3 ranks hold."""
    held = spans((3, 2, 2))
    start, stop = held[comm.coordinates["cp"]]
    needed = tuple(Window(5, 1, 2, 1).reads(*span) for span in held)
    comm.log = []
    x = torch.arange(7.0, dtype=F64)[start:stop].clone().requires_grad_()
    found = fetched(comm, x, "cp", 0, (3, 2, 2), needed, -1.0)
    found.backward(torch.ones_like(found))
    assert x.grad is not None
    return found.detach(), x.grad, [(str(t.primitive), t.nbytes) for t in comm.log]


def _check_halo(results: list[Halo]) -> None:
    assert [found.tolist() for found, _, _ in results] == [
        [-1, -1, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [3, 4, 5, 6, -1, -1],
    ]  # fmt: skip
    assert torch.cat([grad for _, grad, _ in results]).tolist() == [1, 2, 2, 3, 3, 2, 2]
    assert [sent for _, _, sent in results] == [
        [(SHIFT, 16)] * 2,
        [(SHIFT, 32)] * 2,
        [(SHIFT, 16)] * 2,
    ]


def test_only_what_is_needed_is_sent() -> None:
    _check_halo(simulate({"cp": 3}, _halo))


def test_nothing_is_sent_where_windows_end_at_the_borders() -> None:
    for case in (CONVS["stride without overlap"], POOLS["max"]):
        inputs = len(case.tensors)
        text = "S(2) R|P R|P -> S(2)" if inputs == 3 else "S(2) -> S(2)"
        assert check(case, {"tp": text}, {"tp": 2}) == [[], []]


def test_on_processes() -> None:
    _check_halo(on_gloo(_halo, 3))
