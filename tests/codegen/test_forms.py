"""Forms of tensor parallelism by hand on simulated ranks: the numbers, and what they send."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.one_process import run_local
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.check_layout import layout_problems
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import BlockLayout
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.testing import tensor_forms as forms
from meshwright.testing.models import ModelCase
from meshwright.testing.simulated import simulate
from meshwright.testing.tensor_forms import Form
from meshwright.testing.whole_values import held
from tests.codegen.equality import plan_of, rank_of, run_plan, samples_of, whole_tensor

FORMS = forms.forms()
UNEVEN = {"1d_sequence": (5, 7), "2d": (5, 7), "2.5d": (6, 7), "3d": (6, 7)}
"""Tokens and width of which ranks get unequal parts, on the innermost axis of every dim."""


def traced(case: ModelCase) -> Graph:
    return trace(case.model(), case.example(), None, global_batch_size=case.batch_size)


def check(case: ModelCase, form: Form, shares: tuple[int, ...], count: int, *, flat: bool) -> None:
    graph, model, batch = traced(case), case.model(), case.example()
    layouts = forms.layouts(graph, form, flat=flat)
    assert not list(problems(graph, layouts))
    loss, gradients = run_plan(
        model, graph, plan_of(graph, layouts, shares, count), flatten_batch(batch)
    )
    wanted = model(*batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def problems(graph: Graph, layouts: Iterable[BlockLayout]) -> Iterable[str]:
    for layout in layouts:
        for block in graph.distinct_blocks():
            if block.pattern == layout.pattern:
                yield from layout_problems(graph, block, layout)


@pytest.mark.sampled
@pytest.mark.parametrize(("shares", "count"), [((4,), 1), ((1, 1), 2), ((3, 1), 1)])
@pytest.mark.parametrize("flat", [False, True], ids=["tokens", "flat"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_the_model(
    name: str, flat: bool, shares: tuple[int, ...], count: int
) -> None:
    check(forms.case(layers=3, flat=flat), FORMS[name], shares, count, flat=flat)


@pytest.mark.parametrize("flat", [False, True], ids=["tokens", "flat"])
@pytest.mark.parametrize("name", UNEVEN)
def test_innermost_parts_may_be_uneven(name: str, flat: bool) -> None:
    tokens, width = UNEVEN[name]
    case = forms.case(tokens=tokens, width=width, layers=2, flat=flat)
    check(case, FORMS[name], (3, 1), 1, flat=flat)


@pytest.mark.parametrize(
    ("border", "hidden", "stored", "says"),
    [
        ({"tp_row": "S(2)"}, {}, {}, "S(2) on tp_row and S(2) on tp_col do not nest"),
        ({}, {}, {"tp_row": "S(0)"}, "inside the 2 parts of tp_row, as S(0,outer=2) does"),
        ({}, {}, {"tp_row": "S(0,outer=4,inner=4)"}, "1 units for tp_row 2"),
        ({"dp": "S(1)"}, {}, {}, "4 units, which do not hold 3 samples"),
        ({}, {"tp": "S(2)"}, {}, "the axes of the layout are dp, tp_row, tp_col"),
        ({"tp": "S(2)"}, {}, {}, "axis 'tp' is not one of its dp, tp_row, tp_col"),
    ],
)
def test_what_is_wrong_with_a_layout_is_said(
    border: dict[str, str], hidden: dict[str, str], stored: dict[str, str], says: str
) -> None:
    case, form = forms.case(batch=3), FORMS["2d"]
    broken = replace(
        form,
        border=form.border | border,
        hidden=form.hidden | hidden,
        stored=form.stored | {"up.weight": form.stored["up.weight"] | stored},
    )
    graph = traced(case)
    found = list(problems(graph, forms.layouts(graph, broken)))
    assert any(says in problem for problem in found), found


def test_the_source_says_which_axis_moves_what() -> None:
    graph = traced(forms.case(tokens=8, width=8, layers=2))
    plan = plan_of(graph, forms.layouts(graph, FORMS["3d"]), (4,))
    (program,) = lower(graph, plan, 5)
    assert "at dp 0 of 1, tp_depth 1 of 2, tp_row 0 of 2, tp_col 1 of 2.\n" in program.source
    assert (
        "    # layers.1.up.weight over tp_depth: forward all_gather 256 B; "
        "backward reduce_scatter 512 B\n"
        '    up_weight_whole = comm.all_gather(up_weight, "tp_depth", 0, (8, 8), '
        'backward="reduce_scatter")\n'
    ) in program.source
    assert max(map(len, program.source.splitlines())) <= 100


def sent(case: ModelCase, form: Form, *, recompute: bool) -> Counter[str]:
    """Elements that a rank receives per axis in a step. With `recompute`, forwards run again for
    the backward, so that nothing that was gathered is kept."""
    graph, model = traced(case), case.model()
    plan = plan_of(graph, forms.layouts(graph, form), (graph.batch_size,))

    def body(comm: Comm) -> Counter[str]:
        comm.log = []
        programs = lower(graph, plan, rank_of(plan.stages[0], comm))
        params = {p.name: p for program in programs for p in program.params}
        stored = {
            name: held(whole_tensor(model, graph, name), p.runs).clone().requires_grad_()
            for name, p in params.items()
        }
        batch = samples_of(graph, flatten_batch(case.example()), 0, graph.batch_size)
        loss = run_local(programs, stored, [batch], comm)
        forward = list(comm.log) if recompute else []
        loss.backward()
        for name, p in params.items():
            for axis in p.sum_over:
                comm.sum_over(stored[name].detach(), axis)
        return volume([*comm.log, *forward], comm.sizes)

    found = simulate({"dp": 1, **form.mesh}, body)
    assert all(ranks == found[0] for ranks in found)
    return found[0]


def volume(log: Iterable[SentCollective], sizes: dict[str, int]) -> Counter[str]:
    """What a ring moves to each rank, in elements of float64."""
    total: Counter[str] = Counter()
    for axis, primitive, nbytes in log:
        n, elements = sizes[axis], nbytes // 8
        moved = {
            Primitive.ALL_GATHER: (n - 1) * elements,
            Primitive.REDUCE_SCATTER: (n - 1) * elements // n,
            Primitive.ALL_REDUCE: 2 * (n - 1) * elements // n,
        }
        total[axis] += moved[Primitive(primitive)]
    return total


def published(name: str, m: int, h: int, q: int, passes: int) -> dict[str, float]:
    """Elements per rank and axis for one MLP h -> 4h -> h of m tokens, forward and backward.

    X, W and Y are what goes into the two multiplications, their weights and what comes out.
    1D on P ranks: an all-reduce of m*h in forward and one in backward, 4(P-1)/P m h in all.
    2D on [q, q] (SUMMA): X moves along columns, W along rows: 3(q-1)/q^2 (X + W), as forward and
    both products of the backward move both; 2(q-1)/q^2 (X + W) where forward keeps what it got.
    2.5D on [d, q, q]: X has 1/d of the tokens, and the gradients of W are all-reduced over the
    depth: 3(q-1)/(d q^2) X + 3(q-1)/q^2 W + 2(d-1)/d W/q^2; again 2 instead of 3 if kept.
    3D on [q, q, q]: each of X, W and Y moves along one axis twice: 2(q-1)/q^3 (X + W + Y).
    """
    x, y, w = (m * h, 4 * m * h), (4 * m * h, m * h), 8 * h * h
    one = (q - 1) / q**2
    match name:
        case "1d" | "1d_sequence":
            return {"tp": 4 * (q - 1) / q * m * h}
        case "2d":
            return {"tp_col": passes * one * sum(x), "tp_row": passes * one * w}
        case "2.5d":
            depth = 2 * (q - 1) / q * w / q**2
            return {"tp_col": passes * one * sum(x) / q, "tp_row": passes * one * w,
                    "tp_depth": depth}  # fmt: skip
    return {"tp_depth": 2 * one * w / q, "tp_row": 2 * one * (x[0] + y[1]) / q,
            "tp_col": 2 * one * (x[1] + y[0]) / q}  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_what_is_sent_is_what_was_published(name: str, recompute: bool) -> None:
    """That of the layer which three layers have and two have not."""
    small, large = (forms.case(tokens=8, width=8, layers=n, bias=False) for n in (2, 3))
    found = sent(large, FORMS[name], recompute=recompute)
    found.subtract(sent(small, FORMS[name], recompute=recompute))
    wanted = published(name, 4 * 8, 8, 2, passes=3 if recompute else 2)
    if recompute and name in ("1d", "1d_sequence", "3d"):  # what a second forward adds
        wanted = {axis: elements * 3 / 2 for axis, elements in wanted.items()}
    assert dict(found) == wanted


@pytest.mark.parametrize(
    ("tokens", "width", "figures"),
    [(6144, 3072, (74.3, 55.7, 62.8, 24.8)), (16384, 3072, (198, 107, 85, 54))],
)
def test_the_formulas_are_those_of_the_papers_on_64_ranks(
    tokens: int, width: int, figures: tuple[float, ...]
) -> None:
    for name, q, figure in zip(("1d", "2d", "2.5d", "3d"), (64, 8, 4, 4), figures, strict=True):
        total = sum(published(name, tokens, width, q, passes=3).values()) / 1e6
        assert total == pytest.approx(figure, rel=0.01), name
