"""Which kernel attends to some of the keys: on GPUs, of which there are only the shapes here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.codegen.attention.attend import (
    AttentionStats,
    Visible,
    attend,
    attend_backward,
)
from meshwright.ir import torch_attention
from meshwright.ir.torch_modes import recording
from meshwright.ir.torch_private import fake_mode
from meshwright.testing.fake_gpu import process
from meshwright.testing.fake_gpu.beside import beside_guard

pytestmark = pytest.mark.skipif(bool(process.why_not()), reason=process.why_not())

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
SCORES = {"bmm", "logsumexp", "exp"}


@dataclass(frozen=True)
class Asked:
    """2 samples of 3 heads of keys, each for 4 of queries."""

    dtype: torch.dtype
    widths: tuple[int, int] = (64, 64)
    capability: tuple[int, int] = (9, 0)
    rows: int = 40
    keys: int = 40
    causal: bool = False


def _called(asked: Asked) -> Counter[str]:
    """Operators forward and backward."""
    names = Counter[str]()

    def called(func: object, *_: object) -> None:
        names[str(func).split(".")[1]] += 1

    shapes = (
        (2, 3, 4, asked.rows, asked.widths[0]), (2, 3, asked.keys, asked.widths[0]),
        (2, 3, asked.keys, asked.widths[1]),
    )  # fmt: skip
    with patch.object(torch.cuda, "get_device_capability", lambda _: asked.capability), fake_mode():
        made = [torch.empty(shape, dtype=asked.dtype, device="cuda") for shape in shapes]
        seen = Visible(0.1, first=0 if asked.causal else None)
        query, key, value = made
        with recording(called):
            part = attend(query, key, value, seen)
            out = part.out.to(asked.dtype)
            known = AttentionStats(out, part.total, torch.empty_like(out))
            found = attend_backward(query, key, value, seen, known, False)
    wide = torch.promote_types(asked.dtype, torch.float32)
    rows: Tensor = query.expand(2, 3, 4, asked.rows, asked.widths[0])
    assert part.out.shape == (*rows.shape[:-1], asked.widths[1]) and part.out.dtype is wide
    assert part.total.shape == (*rows.shape[:-1], 1) and part.total.dtype is wide
    for x, grad in zip(made, found[:3], strict=True):
        assert grad is not None and grad.shape == x.shape and grad.dtype is wide
        assert grad.device.type == "cuda"
    return names


def _all_called(asked: Sequence[Asked]) -> list[Counter[str]]:
    return [_called(one) for one in asked]


BY_KERNEL = {
    Asked(dtype, widths, capability, causal=causal): kernel
    for causal in (False, True)
    for dtype, widths, capability, kernel in (
        (torch.bfloat16, (64, 64), (9, 0), FLASH),
        (torch.float16, (64, 64), (8, 0), FLASH),
        (torch.bfloat16, (192, 128), (9, 0), FLASH),
        (torch.bfloat16, (20, 20), (9, 0), FLASH),
        (torch.bfloat16, (288, 288), (9, 0), EFFICIENT),
        (torch.float16, (64, 64), (7, 0), EFFICIENT),
        (torch.float32, (64, 64), (9, 0), EFFICIENT),
    )
}
OTHER_LENGTHS = [Asked(torch.bfloat16, rows=rows, causal=True) for rows in (24, 64)]
WHOLE = Asked(torch.float64, causal=True)


@cache
def _found() -> dict[Asked, Counter[str]]:
    every = [*BY_KERNEL, *OTHER_LENGTHS, WHOLE]
    return dict(zip(every, beside_guard(_all_called, every), strict=True))


@pytest.mark.parametrize("asked", BY_KERNEL, ids=str)
def test_gpus_keep_no_scores(asked: Asked) -> None:
    names, kernel = _found()[asked], BY_KERNEL[asked]
    assert names[kernel] == names[f"{kernel}_backward"] == 1
    assert not SCORES & {*names}


def test_causal_with_other_numbers_of_keys_begins_at_the_first() -> None:
    """FlashAttention's last query would see the last key."""
    for asked in OTHER_LENGTHS:
        assert _found()[asked][EFFICIENT] == 1 and not _found()[asked][FLASH]


def test_logarithms_go_to_the_kernel_with_infinity_behind_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads 32 at a time, and what is infinite gives chances of nothing."""
    given = list[Tensor]()

    def backward(*args: Any, **_: Any) -> tuple[Tensor, ...]:
        given.append(args[6])
        return args[:4]

    operators = SimpleNamespace(**{f"{EFFICIENT}_backward": backward})
    monkeypatch.setattr(torch_attention, "_ATEN", operators)
    for rows, whole in ((40, 64), (64, 64)):
        x, total = torch.zeros(1, 2, rows, 8), torch.arange(2.0 * rows).view(1, 2, rows)
        torch_attention.CUDA_EFFICIENT.backward(x, (x, x, x), x, total, True, 1.0)
        assert given[-1].shape == (1, 2, whole)
        assert given[-1][..., :rows].equal(total) and given[-1][..., rows:].isposinf().all()


def test_float64_has_scores_of_some_queries_at_a_time() -> None:
    assert {*_found()[WHOLE]} >= SCORES
