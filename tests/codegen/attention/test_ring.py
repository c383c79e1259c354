"""Attention split along the sequence, against the whole attention, forward and backward."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.attention import attend, fused
from meshwright.codegen.attention.ring import ring_attention
from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.op_messages import SHIFT
from meshwright.testing.simulated import simulate
from tests.codegen import one_op
from tests.codegen.processes import on_gloo

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """An attention and how the sequence is split."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 2
    groups: int = 2
    mask: str = ""
    causal: bool = False
    scale: float | None = None
    width: int = 4
    lead: tuple[int, ...] = (2,)
    sections: int = 1
    """The sequence is cut into so many, each split as `queries` and `keys` say."""
    zigzag: bool = False

    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Queries, keys, values, mask, gradient of the result."""
        generator = torch.Generator().manual_seed(len(self.mask) + sum(self.queries))
        rows, columns = self.sections * sum(self.queries), self.sections * sum(self.keys)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=F64, generator=generator)

        lead = self.lead
        q, k = random(*lead, self.heads, rows, 4), random(*lead, self.groups, columns, 4)
        v = random(*lead, self.groups, columns, self.width)
        grad = random(*lead, self.heads, rows, self.width)
        return q, k, v, self._mask(random, rows, columns), grad

    def _mask(self, random, rows: int, columns: int) -> Tensor | None:  # type: ignore[no-untyped-def]
        match self.mask:
            case "":
                return None
            case "bool":  # the last query sees nothing at all
                mask: Tensor = random(rows, columns) > 0
                mask[-1] = False
                return mask
            case "padding":
                return torch.arange(columns) < torch.tensor([columns, 2]).view(2, 1, 1, 1)
            case "heads":
                return random(self.heads, rows, columns)  # type: ignore[no-any-return]
            case "batch of heads":
                return random(1, self.heads, rows, columns)  # type: ignore[no-any-return]
            case "columns":
                return random(1, self.heads, 1, columns)  # type: ignore[no-any-return]
            case "rows":
                return random(2, 1, rows, 1)  # type: ignore[no-any-return]
        raise AssertionError(self.mask)


CASES = {
    "two": Case((4, 4), (4, 4)),
    "causal": Case((4, 4), (4, 4), causal=True),
    "causal uneven": Case((3, 3, 2), (3, 3, 2), causal=True),
    "causal grouped": Case((3, 2), (3, 2), heads=6, groups=2, causal=True),
    "one key head": Case((2, 2, 2, 2), (2, 2, 2, 2), heads=3, groups=1),
    "cross": Case((3, 2), (4, 3), scale=0.3),
    "causal cross, fewer keys": Case((5, 4), (3, 2), causal=True),
    "causal cross, fewer queries": Case((2, 1), (5, 4), causal=True),
    "wide values": Case((2, 1), (2, 1), width=7),
    "bool": Case((3, 3, 2), (3, 3, 2), mask="bool"),
    "padding": Case((3, 3), (2, 2), mask="padding"),
    "bias": Case((3, 2), (3, 2), heads=4, groups=2, mask="heads"),
    "bias of columns": Case((3, 2), (3, 2), mask="columns"),
    "bias of rows": Case((3, 2), (3, 2), mask="rows"),
    "sections": Case((3, 2), (3, 2), causal=True, sections=3),
    "sections grouped": Case((2, 1, 1), (2, 1, 1), heads=4, causal=True, sections=2),
    "sections, fewer keys": Case((3, 2), (1, 1), causal=True, sections=3),
    "sections and a bias": Case((3, 2), (3, 2), mask="heads", sections=2),
    "sections and a mask": Case((2, 2), (1, 2), mask="bool", sections=2),
    "zigzag": Case((2, 2), (2, 2), causal=True, sections=2, zigzag=True),
    "zigzag of three": Case((2, 2, 2), (2, 2, 2), heads=4, causal=True, sections=2, zigzag=True),
    "zigzag of four": Case((1,) * 4, (1,) * 4, causal=True, sections=4, zigzag=True),
    "zigzag and a mask": Case((2, 2), (1, 1), mask="bool", sections=2, zigzag=True),
    "zigzag and a bias": Case((1,) * 3, (2,) * 3, mask="heads", sections=2, zigzag=True),
    "no batch": Case((3, 2), (3, 2), lead=(), causal=True),
}


def whole(case: Case) -> tuple[Tensor, list[Tensor | None]]:
    """The result and the gradients of q, k, v and mask."""
    *inputs, grad = case.values()
    leaves = [None if x is None else _leaf(x) for x in inputs]
    q, k, v, mask = leaves
    out = scaled_dot_product_attention(
        q, k, v, mask, 0.0, case.causal, scale=case.scale, enable_gqa=case.heads != case.groups
    )
    out.backward(grad)
    return out.detach(), [None if x is None else x.grad for x in leaves]


def _leaf(x: Tensor) -> Tensor:
    x = x.detach().clone()
    return x.requires_grad_() if x.is_floating_point() else x


def split(
    x: Tensor, sizes: tuple[int, ...], rank: int, sections: int = 1, zigzag: bool = False
) -> Tensor:
    """A rank's share of the sequence; the whole if there is one for all."""
    if x.shape[-2] == 1:
        return x
    runs, ranks = torch.split_with_sizes(x, sizes * sections, -2), len(sizes)
    return torch.cat(
        [runs[i * ranks + at] for i, at in enumerate(_ways(ranks, rank, sections, zigzag))], -2
    )


def _ways(ranks: int, rank: int, sections: int, zigzag: bool) -> list[int]:
    """Which part of each section a rank has."""
    return [ranks - 1 - rank if zigzag and i % 2 else rank for i in range(sections)]


def joined(
    parts: list[Tensor], sizes: tuple[int, ...], sections: int, zigzag: bool = False
) -> Tensor:
    """The sequence that was split."""
    runs = [
        torch.split_with_sizes(part, [size] * sections, -2)
        for part, size in zip(parts, sizes, strict=True)
    ]
    together = [list(section) for section in zip(*runs, strict=True)]
    if zigzag:
        together[1::2] = [section[::-1] for section in together[1::2]]
    return torch.cat([run for section in together for run in section], -2)


def ringed(case: Case, comm: Comm, axis: str = "cp") -> tuple[Tensor, list[Tensor | None]]:
    """What one rank finds."""
    q, k, v, mask, grad = case.values()
    rank = comm.coordinates[axis]
    sizes = (case.queries, case.keys, case.keys, case.queries)
    leaves = [
        None if x is None else _leaf(split(x, share, rank, case.sections, case.zigzag))
        for x, share in zip((q, k, v, mask), sizes, strict=True)
    ]
    out = ring_attention(
        comm, leaves[0], leaves[1], leaves[2], axis, case.queries, case.keys, leaves[3], 0.0,
        case.causal, case.scale, case.heads != case.groups, (case.sections, case.sections),
        case.zigzag,
    )  # fmt: skip
    out.backward(split(grad, case.queries, rank, case.sections, case.zigzag))
    return out.detach(), [None if x is None else x.grad for x in leaves]


def check(case: Case, results: list[tuple[Tensor, list[Tensor | None]]]) -> None:
    out, grads = whole(case)
    made = joined([made for made, _ in results], case.queries, case.sections, case.zigzag)
    torch.testing.assert_close(made, out)
    sizes = (case.queries, case.keys, case.keys, case.queries)
    for i, grad in enumerate(grads):
        if grad is not None:
            parts = [part for _, found in results if (part := found[i]) is not None]
            together = (
                torch.stack(parts).sum(0)
                if grad.shape[-2] == 1
                else joined(parts, sizes[i], case.sections, case.zigzag)
            )
            torch.testing.assert_close(together, grad)


@pytest.mark.parametrize("name", CASES)
def test_ring_is_the_whole_attention(name: str) -> None:
    case = CASES[name]
    check(case, simulate({"cp": len(case.keys)}, lambda comm: ringed(case, comm)))


@pytest.mark.parametrize("name", ["causal uneven", "causal grouped", "bias", "sections"])
def test_scores_of_some_queries_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "SCORES", 20)
    monkeypatch.setattr(fused, "fits", lambda *_: False)
    case = CASES[name]
    check(case, simulate({"cp": len(case.keys)}, lambda comm: ringed(case, comm)))


def _op(case: Case) -> one_op.Case:
    q, k, v, mask, _ = case.values()
    args = {"query": q, "key": k, "value": v, "attn_mask": mask, "dropout_p": 0.0}
    args |= {"is_causal": case.causal, "scale": case.scale}
    args["enable_gqa"] = case.heads != case.groups
    return one_op.Case("aten.scaled_dot_product_attention.default", args)


SPLIT = {"cp": "S(2) S(2) S(2) -> S(2)", "tp": "S(1) S(1) S(1) -> S(1)"}


@pytest.mark.parametrize("name", ["causal uneven", "causal grouped", "cross"])
def test_heads_over_one_axis_and_sequence_over_another(name: str) -> None:
    one_op.check(_op(CASES[name]), SPLIT, {"cp": 2, "tp": 2})


def test_a_mask_is_split_with_heads_and_queries() -> None:
    split = {"cp": "S(2) S(2) S(2) S(2) -> S(2)", "tp": "S(1) S(1) S(1) S(1) -> S(1)"}
    heads = _op(replace(CASES["bias"], groups=4, mask="batch of heads"))
    one_op.check(heads, split, {"cp": 2, "tp": 2})
    columns = _op(CASES["bias of columns"])
    split = {"cp": "S(2) S(2) S(2) R|P -> S(2)", "tp": "S(1) S(1) S(1) S(1) -> S(1)"}
    one_op.check(columns, split, {"cp": 2, "tp": 2})


def test_sections_even_out() -> None:
    """Placements with `outer`, as where another axis splits inside."""
    split = {
        "cp": "S(2,outer=2) S(2,outer=2) S(2,outer=2) -> S(2,outer=2)", "tp": SPLIT["tp"],
    }  # fmt: skip
    case = Case((8,), (8,), heads=4, causal=True)
    one_op.check(_op(replace(case, groups=4)), split, {"cp": 2, "tp": 2})


def test_zigzag_with_another_axis_inside_and_in_rows_of_tokens() -> None:
    """Heads split beside it, and tokens of all samples in one dim, which cp and tp split."""
    zigzag = "S(2,outer=2,zigzag)"
    split = {"cp": " ".join([zigzag] * 3) + f" -> {zigzag}", "tp": SPLIT["tp"]}
    for ranks in (2, 4):
        case = Case((8,), (8,), heads=4, groups=4, causal=True)
        one_op.check(_op(case), split, {"cp": ranks, "tp": 2})
    x, weight = (torch.randn(n, 6, dtype=F64, requires_grad=True) for n in (16, 5))
    rows = {"cp": "S(0,outer=4,zigzag) R|P -> S(0,outer=4,zigzag)", "tp": "R|P S(0) -> S(1)"}
    one_op.check(one_op.Case("aten.linear.default", {"input": x, "weight": weight}), rows,
                 {"cp": 2, "tp": 2})  # fmt: skip


def test_zigzag_of_queries_alone_is_refused() -> None:
    split = "S(2,outer=2,zigzag) S(2,outer=2) S(2,outer=2) -> S(2,outer=2,zigzag)"
    with pytest.raises(PlanError, match="both are in zigzag or neither"):
        one_op.check(_op(Case((8,), (8,), causal=True)), {"cp": split}, {"cp": 2})


def test_ring_over_one_axis_only() -> None:
    with pytest.raises(PlanError, match="split over cp, tp"):
        one_op.check(_op(CASES["two"]), {"cp": SPLIT["cp"], "tp": SPLIT["cp"]}, {"cp": 2, "tp": 2})
    queries = "S(2,outer=2) R|P R|P -> S(2,outer=2)"
    with pytest.raises(PlanError, match="split over cp, tp"):
        one_op.check(_op(CASES["two"]), {"cp": SPLIT["cp"], "tp": queries}, {"cp": 2, "tp": 2})


def test_volume() -> None:
    """Keys and values go round forward; in backward again, and their gradients."""
    case = CASES["causal uneven"]

    def body(comm: Comm) -> list[SentCollective]:
        comm.log = []
        ringed(case, comm)
        return comm.log

    per_key = 2 * 2 * (4 + 4) * 8
    ranks = simulate({"cp": 3}, body)
    assert {t.primitive for log in ranks for t in log} == {SHIFT}
    assert [sum(t.nbytes for t in log) for log in ranks] == [
        per_key * (2 * (8 - left) + 8 - right) for left, right in ((3, 3), (2, 3), (3, 2))
    ]


def test_what_is_no_number_is_not_left_out() -> None:
    """A key that has gone wrong is seen by all queries after it, whichever rank has it."""

    def body(comm: Comm) -> Tensor:
        q, k, v = (torch.ones(1, 2, 8, 4, dtype=F64) for _ in range(3))
        k[..., 1, :] = torch.nan
        parts = (split(x, (4, 4), comm.coordinates["cp"]) for x in (q, k, v))
        return ring_attention(comm, *parts, "cp", (4, 4), (4, 4), is_causal=True)

    made = torch.cat(simulate({"cp": 2}, body), -2)
    wrong = made.isnan().any(-1)
    assert wrong[..., 1:].all() and not wrong[..., 0].any()


def test_half_precision_is_added_up_in_single() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, generator=generator).bfloat16() for _ in range(3))
    expected = scaled_dot_product_attention(q.float(), k.float(), v.float())

    def body(comm: Comm) -> Tensor:
        parts = (split(x, (4, 4, 4), comm.coordinates["cp"]) for x in (q, k, v))
        return ring_attention(comm, *parts, axis="cp", queries=(4, 4, 4), keys=(4, 4, 4))

    made = torch.cat(simulate({"cp": 3}, body), -2)
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made, expected.bfloat16(), rtol=0.01, atol=0.01)


def test_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))

    def body(comm: Comm) -> Tensor:
        parts = (split(x, (3, 3), comm.coordinates["cp"]) for x in (q, k, v))
        with torch.autocast("cpu", torch.bfloat16):
            return ring_attention(comm, *parts, axis="cp", queries=(3, 3), keys=(3, 3))

    made = torch.cat(simulate({"cp": 2}, body), -2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v)
    assert made.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(made, expected, rtol=0.02, atol=0.02)


def test_dropout_is_refused() -> None:
    dropping = _op(CASES["two"])
    dropping = one_op.Case(dropping.target, {**dropping.args, "dropout_p": 0.5})
    with pytest.raises(PlanError, match=r"dropout 0\.5 is split along keys"):
        one_op.check(dropping, {"cp": SPLIT["cp"]}, {"cp": 2})
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(PlanError, match="dropout"):
        ring_attention(Comm({}, {"cp": 1}, {"cp": 0}), x, x, x, "cp", (2,), (2,), dropout_p=0.1)


def _on_gloo(comm: Comm) -> tuple[Tensor, list[Tensor | None]]:
    return ringed(CASES["causal uneven"], comm)


def test_on_processes() -> None:
    check(CASES["causal uneven"], on_gloo(_on_gloo, 3))
