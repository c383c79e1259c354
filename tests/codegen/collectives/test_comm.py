"""Every conversion, on threads and on Gloo processes, against the definition of the placements."""

import os
import tempfile
from itertools import product

import pytest
import torch
import torch.distributed as dist

from meshwright.codegen.collectives.comm import Comm, SentCollective, times
from meshwright.ir.layout.conversions import Primitive
from meshwright.testing.simulated import simulate
from tests.codegen.conversions import PLACEMENTS, check

PAIRS = tuple(product(PLACEMENTS, PLACEMENTS))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_conversion_on_threads(ranks: int) -> None:
    def body(comm: Comm) -> None:
        for source, target in PAIRS:
            check(source, target, comm)

    simulate({"tp": ranks}, body)


def _gloo(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    comm = Comm({"tp": dist.group.WORLD}, {"tp": ranks}, {"tp": rank})
    for source, target in PAIRS:
        check(source, target, comm)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_conversion_on_gloo(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        store = os.path.join(folder, "store")
        children = [context.Process(target=_gloo, args=(r, ranks, store)) for r in range(ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [0] * ranks


def test_traffic_is_counted() -> None:
    def body(comm: Comm) -> list[SentCollective]:
        comm.log = []
        x = torch.ones(4, requires_grad=True)
        comm.all_reduce(comm.identity(x, "tp", "all_reduce"), "tp", "identity").sum().backward()
        return comm.log

    expected = [SentCollective("tp", Primitive.ALL_REDUCE, 16)] * 2
    assert simulate({"tp": 2}, body) == [expected, expected]


def test_data_slices_follow_the_microbatch() -> None:
    comm = Comm({}, {"dp": 1}, {"dp": 0})
    comm.microbatch, comm.sample_offset = 1, 2
    x = torch.arange(8.0, requires_grad=True)
    y = comm.slice(x, "dp", 0, (4,), "pad", whole=8, per_sample=2)
    y.sum().backward()
    assert y.tolist() == [4, 5, 6, 7]
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert not comm.mask(x, "dp").any(), "only the first micro-batch keeps a replicated summand"


def test_a_missing_group_is_named() -> None:
    with pytest.raises(ValueError, match="'tp' has 2 ranks"):
        Comm({}, {"tp": 2}, {"tp": 0})


def test_counts_are_multiplied_without_rounding() -> None:
    """A user's own count of a replica's tokens, of which all have as many times as many."""
    count = torch.tensor(2**30 + 1)
    assert (
        times(count, (4, 2)).tolist() == 2**31 + 2 and not times(count, (4, 2)).is_floating_point()
    )
    assert float(times(count, (4, 3))) == (2**32 + 4) / 3
    assert times(torch.tensor(1.5), (4, 3)).dtype == torch.float32
