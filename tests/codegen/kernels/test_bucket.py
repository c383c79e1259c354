"""Buckets packed and unpacked by kernels are those that torch's copies make."""

import pytest
import torch

from meshwright.ir import launch
from meshwright.ir.kernels import bucket
from tests.codegen.kernels.bucket_cases import CASES, RANKS, difference
from tests.interpreted import printed


@pytest.mark.parametrize(("source", "flat", "scale"), CASES)
def test_by_torch(source, flat, scale):
    assert launch.way("test", torch.zeros(1)) == "torch"
    assert difference(source, flat, scale) == 0.0


def test_by_triton():
    pytest.importorskip("triton")
    way, *found = printed("tests.codegen.kernels.bucket_cases")
    assert way == "triton" and len(found) == len(CASES)
    for (source, flat, _), far in zip(CASES, found, strict=True):
        # The interpreter cuts what bfloat16 cannot hold; a GPU rounds it.
        assert far <= (2**-7 if (source, flat) == ("float32", "bfloat16") else 0.0)


def test_nothing_to_pack():
    """No gradients at all, and no tensors at all, are zeros of the right shape."""
    rows = bucket.table([6], [2], RANKS)
    made = bucket.pack([None], rows, [2], RANKS, 1.0, torch.float32)
    assert made.tolist() == [[0.0, 0.0]] * RANKS
    nothing = bucket.pack([], bucket.table([], [], RANKS), [], RANKS, 1.0, torch.float32)
    assert nothing.shape == (RANKS, 0)


def test_torch_sees_through_it():
    rows, tensors = bucket.table([6, 3], [2, 1], RANKS), [torch.randn(6), torch.randn(3)]
    given = (tensors, rows, [2, 1], RANKS, 1.0, torch.float32)
    torch.library.opcheck(bucket.pack, given)
    torch.library.opcheck(bucket.unpack, (bucket.pack(*given), tensors, rows, [2, 1]))


def test_addresses_are_brought_to_the_device_once() -> None:
    first, second, rows = torch.ones(3), torch.ones(4), bucket.table((3, 4), (3, 4), 1)
    known = bucket.addresses_of([first, None, second], rows)
    assert known.tolist() == [first.data_ptr(), 0, second.data_ptr()]
    assert bucket.addresses_of([first, None, second], rows) is known
    assert bucket.addresses_of([second, None, first], rows).tolist() == known.tolist()[::-1]
    for _ in range(bucket.MOST_ADDRESSES):
        held = torch.ones(1)
        bucket.addresses_of([held, torch.ones(2)], rows)
        assert bucket.addresses_of([first, None, second], rows) is known, "used all the while"
    assert len(bucket._ADDRESSES) <= bucket.MOST_ADDRESSES
