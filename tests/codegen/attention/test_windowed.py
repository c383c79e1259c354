"""Attention over windows: in blocks and in parts, against one mask over all scores."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import windowed
from meshwright.ir.graph.inner_traffic import inner_traffic
from meshwright.ir.layout.layout import parse_strategy
from meshwright.ir.layout.op_messages import LocalOperand
from tests.codegen import one_op

F64 = torch.float64
LENGTH, HEADS, GROUPS = 24, 4, 2


def _inputs(sinks: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64, generator=generator)

    found = {"query": random(2, HEADS, LENGTH, 4), "key": random(2, GROUPS, LENGTH, 4)}
    found["value"] = random(2, GROUPS, LENGTH, 6)
    return found | ({"sinks": random(HEADS)} if sinks else {})


def _by_scores(window: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    """As gpt-oss has it: one more logit, which is dropped behind the softmax."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    at, place = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = (place <= at) & (place > at - (window or LENGTH))
    scores = (query @ key.mT * 0.3).masked_fill(~seen, -torch.inf)
    column = sinks[None, :, None, None].expand(2, -1, LENGTH, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("window", [0, 1, 5, 30])
def test_blocks_are_the_whole_attention(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "BLOCK", 7)
    inputs = {name: x.requires_grad_() for name, x in _inputs(sinks=True).items()}
    wanted = _by_scores(window, **inputs)
    made = windowed.windowed(**inputs, window=window, scale=0.3)
    torch.testing.assert_close(made, wanted)
    grad = torch.randn(wanted.shape, dtype=F64)
    leaves = list(inputs.values())
    for one, other in zip(
        torch.autograd.grad(made, leaves, grad), torch.autograd.grad(wanted, leaves, grad),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)
    plain = {name: x for name, x in inputs.items() if name != "sinks"}
    at, place = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    mask = (place <= at) & (place > at - (window or LENGTH))
    whole = scaled_dot_product_attention(*plain.values(), mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(windowed.windowed(**plain, window=window, scale=0.3), whole)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_no_kernel_makes_whole_scores(
    window: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention of CPUs takes it, also of narrow values; GPUs' wants as many heads of keys as
    of queries, with a mask, and as wide values as keys."""
    seen = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, **more: Any) -> Tensor:
        seen.append((query, key, value))
        assert not mask or query.shape[-3] == key.shape[-3]
        return scaled_dot_product_attention(query, key, value, *mask, **more)

    monkeypatch.setattr(windowed, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(windowed, "BLOCK", 7)
    inputs = _inputs(sinks)
    inputs["value"] = inputs["value"][..., :3]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        made = windowed.windowed(**inputs, window=window)
    assert made.shape == (2, HEADS, LENGTH, 3)
    assert len(seen) == (4 if window else 1)
    assert all(key.shape == value.shape for _, key, value in seen)


PARTS = {
    "runs": "S(2)", "zigzag": "S(2,outer=2,zigzag)", "sections": "S(2,outer=3)",
}  # fmt: skip


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_fetch_what_lies_before_them(parts: str, sinks: bool) -> None:
    """Windows within a part, over the border of one, and over several; heads split beside it. What
    the busiest rank sends is what is priced."""
    shard, own = PARTS[parts], _inputs(sinks)
    more, heads = (" R|P", " S(0)") if sinks else ("", "")
    split = {"cp": f"{shard} {shard} {shard}{more} -> {shard}",
             "tp": f"S(1) S(1) S(1){heads} -> S(1)"}  # fmt: skip
    for ranks, window in ((2, 4), (4, 9), (4, 2), (2, 1)):
        args = {**own, "window": window, "sinks": own.get("sinks"), "scale": 0.3}
        names = ("query", "key", "value", "window", "sinks", "scale")
        ordered = {name: args[name] for name in names}
        case = one_op.Case("meshwright.windowed_attention.default", ordered)
        logs = one_op.check(case, split, {"cp": ranks, "tp": 2})
        assert _busiest(logs) == _priced(case, split["cp"], ranks)


def _busiest(logs: list[list[SentCollective]]) -> list[int]:
    """Bytes of the most that a rank sends, forward and backward."""
    return [max(sent) for sent in zip(*([one.nbytes for one in log] for log in logs), strict=True)]


def _priced(case: one_op.Case, strategy: str, ranks: int) -> list[int]:
    """The same by the family, where half of the heads are on each rank of another axis."""
    parsed, known = parse_strategy(strategy), case.tensors
    op = case.site({}, tuple(known[0].shape), Comm({}, {}, {})).op
    here = [LocalOperand(tuple(x.shape), x.nbytes // 2) for x in known]
    return [m.nbytes for m in inner_traffic(op, parsed, ranks, here, here[:1])]


def test_uneven_parts_and_those_that_differ() -> None:
    case = one_op.Case("meshwright.windowed_attention.default", {**_inputs(False), "window": 7})
    one_op.check(case, {"cp": "S(2) S(2) S(2) -> S(2)"}, {"cp": 5})
    with pytest.raises(PlanError, match="all three split alike"):
        one_op.check(case, {"cp": "S(2) S(2,outer=2) S(2,outer=2) -> S(2)"}, {"cp": 2})
