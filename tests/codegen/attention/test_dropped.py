"""Attention with dropout is attention whose chances are multiplied by factors of their numbers."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.codegen.attention import dropped
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.dropout import dropout
from meshwright.codegen.sharded.seeds import key_of
from meshwright.ir.random.dropout import factors

P = 0.3
B, H, L, K, E = 4, 4, 5, 7, 3


def _comm(**place: int) -> Comm:
    comm = Comm({}, {"tp": 1}, {"tp": 0}, seed=3)
    comm.block, comm.step = "h.1", 2
    comm.sample_offset = place.get("sample", 0)
    return comm


def _operands(heads: int = H, keys: int = K) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, H, L, E), (B, heads, keys, E), (B, heads, keys, E)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def _written_out(q, k, v, mask, causal: bool, scale: float | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (E**-0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    chances = scores.softmax(-1)
    # A query that sees nothing.
    chances = chances.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return chances * factors(chances.detach(), P, key_of(_comm(), "op"), 0, (-1,), (1,)) @ v


def _bool_mask() -> Tensor:
    mask = torch.rand(B, 1, L, K, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[1, 0, 2] = False
    return mask


MASKS = {
    "none": lambda: None,
    "bool": _bool_mask,
    "numbers": lambda: torch.linspace(-2, 2, L * K, dtype=torch.float64).view(L, K),
    "of_heads": lambda: torch.linspace(-1, 1, B * H * L * K, dtype=torch.float64).view(B, H, L, K),
}


@pytest.mark.parametrize("scores", [1 << 24, 2 * H * L * K, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_what_is_written_out(mask, scores, monkeypatch):
    """With all chances at once, kept, and with two samples or one at a time, made again."""
    monkeypatch.setattr(dropped, "SCORES", scores)
    monkeypatch.setattr(dropped, "KEPT", scores)
    given = MASKS[mask]()
    _equal(given, False, None, H)


@pytest.mark.parametrize(
    ("causal", "scale", "heads"), [(True, 0.3, H), (True, None, 2), (False, None, 1)]
)
def test_causal_scaled_and_grouped(causal, scale, heads):
    _equal(None, causal, scale, heads)


def _equal(mask: Tensor | None, causal: bool, scale: float | None, heads: int) -> None:
    operands = _operands(heads, L if causal else K)
    if mask is not None and mask.is_floating_point():
        mask.requires_grad_()
    wanted = _written_out(*operands, mask, causal, scale)
    made = dropped.attention(
        _comm(), *operands, "op", mask, P, causal, scale, heads < H, 1,
        per_sample=H * L * operands[1].shape[-2],
    )  # fmt: skip
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    leaves = [*operands, *([mask] if mask is not None and mask.requires_grad else [])]
    weight = torch.linspace(-1, 1, made.numel(), dtype=torch.float64).view(made.shape)
    found, right = (torch.autograd.grad((x * weight).sum(), leaves) for x in (made, wanted))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_heads_of_ranks_drop_what_all_heads_together_do():
    operands = [x.detach() for x in _operands()]
    each = L * K
    whole = dropped.attention(_comm(), *operands, "op", None, P, rows=1, per_sample=H * each)
    for rank in (0, 1):
        q, k, v = (x.narrow(1, 2 * rank, 2)[1:] for x in operands)
        part = dropped.attention(
            _comm(sample=1), q, k, v, "op", None, P, rows=1, per_sample=H * each,
            first=2 * rank * each, sizes=(-1, 2 * each), strides=(H * each, 1),
        )  # fmt: skip
        torch.testing.assert_close(part, whole[1:, 2 * rank : 2 * rank + 2])


def test_narrow_dtypes_are_added_up_in_float32():
    operands = [x.detach() for x in _operands()]
    whole = dropped.attention(_comm(), *operands, "op", None, P, rows=1, per_sample=H * L * K)
    narrow = [x.bfloat16() for x in operands]
    made = dropped.attention(_comm(), *narrow, "op", None, P, rows=1, per_sample=H * L * K)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), whole, rtol=0.03, atol=0.03)


def test_nothing_is_dropped_in_evaluation_and_all_by_one():
    operands = [x.detach() for x in _operands()]
    comm = _comm()
    assert not dropped.attention(comm, *operands, "op", None, 1.0, rows=1).any()
    plain = scaled_dot_product_attention(*operands)
    comm.still = True
    torch.testing.assert_close(dropped.attention(comm, *operands, "op", None, P), plain / (1 - P))
    comm.training = False
    torch.testing.assert_close(dropped.attention(comm, *operands, "op", None, P), plain)


def test_tensors_without_memory_pass_through():
    with FakeTensorMode():
        shape = (B, H, L, E)
        operands = [torch.empty(shape, requires_grad=True) for _ in range(3)]
        made = dropped.attention(_comm(), *operands, "op", None, P, rows=1, per_sample=H * L * L)
        made = dropout(_comm(), made, P, "op", per_sample=H * L * E)
        assert made.shape == shape
        made.sum().backward()
        assert operands[0].grad.shape == shape


class _Count(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _counted(run) -> int:
    """Operators that torch dispatches in a forward and its backward."""
    query = torch.randn(B, L, H, E).transpose(1, 2).requires_grad_()
    with _Count() as counted:
        run(query).sum().backward()
    return counted.count


def test_no_more_is_dispatched_than_by_plain_torch():
    comm, each = _comm(), H * L * L
    ours = lambda x: dropped.attention(  # noqa: E731
        comm, x, x, x, "op", None, P, True, rows=1, per_sample=each
    )
    theirs = lambda x: scaled_dot_product_attention(x, x, x, None, P, True)  # noqa: E731
    assert _counted(ours) <= _counted(theirs)
    alone = _counted(lambda x: dropout(comm, x, P, "op", per_sample=H * L * E))
    assert alone <= _counted(lambda x: torch.dropout(x, P, True))
