"""Experts and tokens split over the same ranks, against the whole op, forward and backward."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.codegen.sharded.routing import routed_experts
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.expert_form import ExpertForm
from meshwright.ir.graph.graph import Arg, Op
from meshwright.ir.graph.inner_traffic import inner_traffic
from meshwright.ir.kernels.route import home_reference, places_of
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import parse_strategy
from meshwright.ir.layout.op_messages import LocalOperand
from meshwright.runtime.profiling.free_lines import FreeLine
from meshwright.testing.simulated import simulate
from tests.codegen.one_op import Case, check
from tests.codegen.processes import on_gloo

F64 = torch.float64
WIDTH, INNER = 4, 3
Shares = tuple[int, ...]
Found = tuple[Tensor, list[Tensor]]
"""The result, and the gradients of tokens, weights and both parameters."""


def values(tokens: int, experts: int, index: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64, generator=generator)

    return [
        random(tokens, WIDTH), index, random(*index.shape), random(experts, 2 * INNER, WIDTH),
        random(experts, WIDTH, INNER), random(tokens, WIDTH),
    ]  # fmt: skip


def differentiated(inputs: list[Tensor], run: object, grad: Tensor) -> Found:
    leaves = [x.detach().clone() for x in inputs]
    for x in leaves:
        x.requires_grad_(x.is_floating_point())
    made = run(*leaves)  # type: ignore[operator]
    made.backward(grad)
    return made.detach(), [x.grad for x in leaves if x.grad is not None]


def whole(tokens: int, experts: int, index: Tensor, form: str = "") -> Found:
    *inputs, grad = values(tokens, experts, index)
    return differentiated(
        inputs, lambda *x: torch.ops.meshwright.experts(*x, "silu", form=form), grad
    )


def routed(comm: Comm, tokens: Shares, experts: Shares, index: Tensor, form: str = "") -> Found:
    given_values = values(sum(tokens), sum(experts), index)
    shares = [tokens, tokens, tokens, experts, experts, tokens]
    rank = comm.coordinates["ep"]
    *inputs, grad = (
        torch.split_with_sizes(x, sizes)[rank]
        for x, sizes in zip(given_values, shares, strict=True)
    )
    return differentiated(
        inputs,
        lambda *x: routed_experts(
            comm,
            *x[:3],
            gate_up=x[3],
            down=x[4],
            act="silu",
            form=form,
            axis="ep",
            experts=experts,
        ),
        grad,
    )


def compare(
    tokens: Shares, experts: Shares, index: Tensor, results: list[Found], form: str = ""
) -> None:
    made, grads = whole(sum(tokens), sum(experts), index, form)
    torch.testing.assert_close(torch.cat([result for result, _ in results]), made)
    for i, expected in enumerate(grads):
        torch.testing.assert_close(torch.cat([found[i] for _, found in results]), expected)


def verify(tokens: Shares, experts: Shares, index: Tensor) -> None:
    """By torch's operators and by those of the kernel; tokens in 8-bit floats with the latter."""
    for kernels, form in ((frozenset[str](), ""), (frozenset({"route"}), "narrow_tokens")):

        def body(comm: Comm, kernels: frozenset[str] = kernels, form: str = form) -> Found:
            comm.kernels = kernels
            return routed(comm, tokens, experts, index, form)

        compare(tokens, experts, index, simulate({"ep": len(tokens)}, body), form)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_any_counts(data: st.DataObject) -> None:
    """Ranks without tokens, experts that nobody wants, a token whose experts repeat."""
    ranks = data.draw(st.integers(2, 4))
    counts = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)
    tokens, experts = tuple(data.draw(counts)), data.draw(st.integers(ranks, 6))
    shares = (experts - ranks + 1, *[1] * (ranks - 1))
    picked = data.draw(st.integers(1, 3))
    flat = st.lists(
        st.integers(0, experts - 1), min_size=sum(tokens) * picked, max_size=sum(tokens) * picked
    )
    index = torch.tensor(data.draw(flat), dtype=torch.int64).view(sum(tokens), picked)
    verify(tokens, shares, index)


def test_all_to_one() -> None:
    verify((3, 2, 0), (2, 2, 1), torch.full((5, 2), 4))


EXPERTS = "meshwright.experts.default"
INDEX = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 0], [3, 1]])


def test_a_token_is_sent_once_to_a_rank() -> None:
    """Both experts of tokens 0, 1 and 3 are on one rank."""

    def body(comm: Comm) -> list[SentCollective]:
        comm.log = []
        routed(comm, (3, 2), (2, 2), INDEX)
        return comm.log

    logs = simulate({"ep": 2}, body)
    assert {t.primitive for log in logs for t in log} == {Primitive.ALL_TO_ALL}
    row = WIDTH * 8
    counts, index, hidden = zip(*(log[:3] for log in logs), strict=True)
    assert [t.nbytes for t in counts] == [16, 16]
    assert [t.nbytes for t in index] == [4 * 16, 3 * 16]
    assert [t.nbytes for t in hidden] == [4 * row, 3 * row]


def test_expected_traffic_is_that_of_balanced_routing() -> None:
    """Every pair of 4 experts once a rank: what `inner_traffic` says is what is sent."""
    index = torch.tensor(list(permutations(range(4), 2)) * 2)

    def body(comm: Comm) -> list[SentCollective]:
        comm.log = []
        routed(comm, (12, 12), (2, 2), index)
        return comm.log

    logs = simulate({"ep": 2}, body)
    operands = [
        LocalOperand((24, WIDTH), 24 * WIDTH * 8),
        LocalOperand((24, 2), 384), LocalOperand((24, 2), 384),
        LocalOperand((4, 6, 4), 768), LocalOperand((4, 4, 3), 384),
    ]  # fmt: skip
    op = Op("o", "o", EXPERTS, (), ("a", "b", "c", "d", "e"), ("f",), "")
    strategy = parse_strategy("S(0) S(0) S(0) S(0) S(0) -> S(0)")
    expected = inner_traffic(op, strategy, 2, operands, operands[:1])
    total = sum(m.nbytes * m.times for m in expected)
    assert sum(t.nbytes for log in logs for t in log) == total
    assert sum(len(log) for log in logs) == 2 * sum(m.times for m in expected)


def test_experts_over_one_axis_and_their_width_over_another() -> None:
    *tensors, _ = values(5, 4, INDEX)
    names = ("hidden", "top_k_index", "top_k_weights", "gate_up", "down")
    case = Case(EXPERTS, {**dict(zip(names, tensors, strict=True)), "act": "silu"})
    tokens = "S(0) S(0) S(0) S(0) S(0) -> S(0)"
    check(case, {"ep": tokens}, {"ep": 3})
    width = "R|P R R|P S(1,outer=2) S(2) -> P"
    check(case, {"ep": tokens, "tp": width}, {"ep": 2, "tp": 3})


def test_experts_over_two_axes() -> None:
    """Tokens that have come on one are sent on along the other, whichever is outside; of three
    experts the last rank has one."""
    *tensors, _ = values(8, 6, torch.cat([INDEX, INDEX[:3] + 2]))
    names = ("hidden", "top_k_index", "top_k_weights", "gate_up", "down")
    more: dict[str, Arg] = dict.fromkeys(("up", "gate_up_bias", "down_bias"))
    more["form"] = "narrow_tokens scaled_input"  # rounded once, however often they are sent
    case = Case(EXPERTS, {**dict(zip(names, tensors, strict=True)), "act": "silu", **more})
    first, inside = (" ".join([f"S(0{o})"] * 5) + f" -> S(0{o})" for o in ("", ",outer=2"))
    check(case, {"tp": inside, "ep": first}, {"tp": 2, "ep": 2})
    check(case, {"ep": inside, "tp": first}, {"ep": 2, "tp": 2})
    with pytest.raises(PlanError, match="do not nest"):
        check(case, {"ep": first, "tp": first}, {"ep": 2, "tp": 2})
    with pytest.raises(PlanError, match="on tp, too, where each rank has all tokens"):
        whole = "R|P R R|P S(0,outer=2) S(0,outer=2) -> P"
        check(case, {"tp": whole, "ep": first}, {"tp": 2, "ep": 2})


def test_forms_of_experts_are_split_as_their_rule_says() -> None:
    """Biases, matrices apart, turned and interleaved: every split, and two on two axes at once."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64, generator=generator)

    hidden, weights, inner = draw(5, WIDTH), draw(5, 2), 6
    named = {"hidden": hidden, "top_k_index": INDEX, "top_k_weights": weights}
    turned = ExpertForm(transposed_first=True, interleaved=True, scaled_input=True)
    apart = ExpertForm(transposed_last=True)
    first, last = {"gate_up_bias": draw(4, 2 * inner)}, {"down_bias": draw(4, WIDTH)}
    one = {"gate_up": draw(4, WIDTH, 2 * inner), "down": draw(4, WIDTH, inner), "act": "silu"}
    two = {"gate_up": draw(4, inner, WIDTH), "down": draw(4, inner, WIDTH), "act": "relu"}
    two["up"] = draw(4, inner, WIDTH)
    # Every rank of a split width would add the last bias: that is summands, which come in parts.
    cases = {
        "R|P R R|P S(2,inner=2) S(2) S(1,inner=2) -> P": (one | {"up": None} | first, str(turned)),
        "R|P R R|P S(1) S(1) S(1) S(1,outer=2) -> P": (two | first, str(apart)),
    }
    for width, (args, form) in cases.items():
        narrow = Case(EXPERTS, named | args | {"down_bias": None, "form": form})
        check(narrow, {"ep": width}, {"ep": 2})
        tokens = " ".join([*["S(0)"] * len(narrow.tensors), "-> S(0)"])
        check(narrow, {"ep": tokens, "tp": width}, {"ep": 2, "tp": 3})
        case = Case(EXPERTS, named | args | last | {"form": form})
        check(
            case,
            {"ep": " ".join(["R|P R R|P", *["S(0)"] * (len(case.tensors) - 3), "-> P"])},
            {"ep": 2},
        )
        check(case, {"ep": tokens.replace(" ->", " S(0) ->")}, {"ep": 2})


def test_a_rank_alone_does_the_work_of_one_of_several() -> None:
    """As profiling runs it: what others would send is like what this rank sends."""
    index = torch.tensor([(a, b) for a in range(4) for b in range(4)])
    comm = Comm({"ep": FreeLine(2, 1)}, {"ep": 2}, {"ep": 1})
    hidden, _, weights, gate_up, down, _ = values(16, 4, index)
    made = routed_experts(
        comm, hidden, index, weights, axis="ep", experts=(2, 2), gate_up=gate_up[2:],
        down=down[2:], act="silu",
    )  # fmt: skip
    assert made.shape == hidden.shape and made.abs().sum(1).min() > 0


def _on_gloo(comm: Comm) -> list[Found]:
    return [routed(comm, (3, 0, 2), (2, 1, 1), INDEX, form) for form in FORMS]


FORMS = "", "narrow_tokens"


def test_on_processes() -> None:
    found = on_gloo(_on_gloo, 3, "ep")
    for number, form in enumerate(FORMS):
        compare((3, 0, 2), (2, 1, 1), INDEX, [rank[number] for rank in found], form)
    plain, rounded = (whole(5, 4, INDEX, form)[0] for form in FORMS)
    assert 1e-3 < float((plain - rounded).norm() / plain.norm()) < 0.1


def test_the_sum_of_rows_that_come_home_keeps_none() -> None:
    """Its gradient is a gather; torch's own sum keeps the rows for their shape."""
    owned = torch.tensor([[True, False, True, True], [True, True, False, True]])
    tokens, places = places_of(owned)
    rows = torch.randn(len(tokens), WIDTH, dtype=F64, requires_grad=True)
    kept = list[Tensor]()

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        home = home_reference(rows, tokens, places)
    assert all(not x.is_floating_point() for x in kept)
    summed = torch.zeros(4, WIDTH, dtype=F64).index_add(0, tokens, rows)
    grad = torch.randn(4, WIDTH, dtype=F64)
    torch.testing.assert_close(home, summed, rtol=0, atol=0)
    ours, theirs = (torch.autograd.grad(x, rows, grad)[0] for x in (home, summed))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
