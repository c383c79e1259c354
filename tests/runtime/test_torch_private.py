"""What we use of torch that is not public does what we think, on the versions named there."""

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime import torch_private
from tests.spawn import run_ranks


def _collectives():
    rank = dist.get_rank()
    gathered = torch.empty(4)
    torch_private.all_gather(gathered, torch.full((2,), float(rank)), None)
    part = torch.empty(2)
    torch_private.reduce_scatter(part, torch.arange(4.0), None).wait()
    store = torch_private.job_store()
    store.set(f"key{rank}", str(rank))
    return gathered.tolist(), part.tolist(), store.get(f"key{1 - rank}")


def test_collectives_and_store():
    first, second = run_ranks(2, _collectives)
    assert first == ([0, 0, 1, 1], [0, 2], b"1")
    assert second == ([0, 0, 1, 1], [4, 6], b"0")


def test_the_version_is_one_it_was_checked_on():
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in torch_private.CHECKED_ON:
        pytest.fail(f"run these tests on torch {version}, then add it to CHECKED_ON")
