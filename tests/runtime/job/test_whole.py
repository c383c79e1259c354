"""Whole tensors are summed in few messages, and no more of them are there at once than before."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.job import whole
from meshwright.testing.spawn import run_ranks

LIMIT = 64
"""Bytes that go together."""
SIZES = [2, 3, 2, 9, 1, 0, 8, 1, 2]
DTYPES = [torch.float64, torch.int64, torch.bool, torch.float64, torch.float64, torch.float32,
          torch.float64, torch.bool, torch.int64]  # fmt: skip


def _value(place: int) -> Tensor:
    return torch.arange(1, SIZES[place] + 1).to(DTYPES[place]).reshape(1, -1)


def _summed(everyone: bool) -> tuple[list[tuple[str, Tensor]], list[list[str]], int]:
    """What comes of tensors that one rank each has; which were made and not yet given whenever
    another was made; and how many messages there were."""
    waiting: list[str] = []
    seen: list[list[str]] = []
    sent, rank = 0, dist.get_rank()

    def counted(call: Any) -> Any:
        def other(x: Tensor, **more: int) -> None:
            nonlocal sent
            sent += 1
            call(x, **more)

        return other

    def made() -> Iterator[tuple[str, Tensor]]:
        for place in range(len(SIZES)):
            seen.append([*waiting])
            waiting.append(str(place))
            own = _value(place)
            yield str(place), own if place % 2 == rank else torch.zeros_like(own)

    whole._TOGETHER_BYTES = LIMIT  # in a process of its own
    dist.all_reduce, dist.reduce = counted(dist.all_reduce), counted(dist.reduce)
    found = []
    for name, x in whole._summed(made(), 2, everyone):
        assert waiting.pop(0) == name, "in their order"
        found.append((name, x))
    return found, seen, sent


def test_small_tensors_go_together_and_large_ones_alone() -> None:
    for everyone in (True, False):
        found = run_ranks(2, _summed, everyone)
        for values, seen, sent in found if everyone else found[:1]:
            for place, (name, x) in enumerate(values):
                assert name == str(place) and x.dtype is DTYPES[place]
                assert torch.equal(x, _value(place)), place
            # 0, 1 and 2 of three dtypes, 3 alone, 4 and 5 of two, 6 alone, 7 and 8 of two.
            waited = [[], ["0"], ["0", "1"], ["0", "1", "2"], [], ["4"], ["4", "5"], [], ["7"]]
            assert seen == waited and sent == 9
