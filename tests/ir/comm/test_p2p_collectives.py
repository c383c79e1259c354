"""Parts sent straight to their ranks against what has to come out, on any group, in any order."""

import pytest
import torch
import torch.distributed as dist

from meshwright.ir import torch_private as private
from meshwright.runtime.record.resident import peak_bytes, reset_peak
from meshwright.testing.spawn import run_ranks

MIB = 2**20


def _mine(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) % 97 + 1000 * (rank + 1)).to(dtype)


def _both(numel: int, dtype: torch.dtype) -> None:
    """Two gathers and a scatter are under way at once and are waited for in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = torch.empty(2, size * numel, dtype=dtype)
    part, summed = _mine(rank, numel, dtype), torch.empty(numel, dtype=dtype)
    whole = torch.cat([_mine(rank + step, numel, dtype) for step in range(size)])
    works = [
        private.start_all_gather(first, part, None),
        private.reduce_scatter(summed, whole, None),
        private.start_all_gather(second, part + 1, None),
    ]
    for work in reversed(works):
        work.wait()
    gathered = torch.cat([_mine(other, numel, dtype) for other in range(size)])
    assert first.equal(gathered) and second.equal(gathered + 1)
    expected = sum(_mine(other + rank, numel, dtype) for other in range(size))
    assert summed.equal(torch.as_tensor(expected))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_every_rank_gets_its_parts(size: int, dtype: torch.dtype) -> None:
    for numel in (1, 1000):
        run_ranks(size, _both, numel, dtype)


def _halves() -> None:
    """Among every second rank, while a ring of all of them passes messages."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(start, size, 2))) for start in (0, 1)]
    mine, result = torch.full((3,), float(rank)), torch.empty(6)
    passed = torch.empty(3)
    arriving = dist.irecv(passed, (rank - 1) % size)
    work = private.start_all_gather(result, mine, groups[rank % 2])
    sent = dist.isend(mine, (rank + 1) % size)
    for one in (work, arriving, sent):
        assert one is not None
        one.wait()
    assert result.tolist() == [rank % 2] * 3 + [rank % 2 + 2] * 3
    assert passed.tolist() == [(rank - 1) % size] * 3


def test_groups_and_other_messages_do_not_mix() -> None:
    run_ranks(4, _halves)


def _half_precision() -> None:
    whole, part = torch.ones(4, dtype=torch.bfloat16), torch.empty(2, dtype=torch.bfloat16)
    private.reduce_scatter(part, whole, None).wait()
    assert part.tolist() == [2.0, 2.0]


def test_half_precision() -> None:
    run_ranks(2, _half_precision)


def _held(nbytes: int) -> int:
    """What a process takes beyond the tensors that it is given."""
    size = dist.get_world_size()
    whole, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // size)
    private.all_gather(torch.ones(size), torch.ones(1), None)
    before = reset_peak()
    for _ in range(8):
        private.all_gather(whole, part, None)
    return peak_bytes() - before


def test_a_gather_takes_no_memory_that_nobody_sees() -> None:
    assert max(run_ranks(2, _held, 32 * MIB)) < 8 * MIB
