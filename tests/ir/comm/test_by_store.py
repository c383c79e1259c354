"""What ranks tell each other through the store, and groups that their members make alone."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.comm import by_store
from meshwright.ir.torch_private import member_group, store_of
from meshwright.testing.spawn import RankFailed, run_ranks

RANKS = 4


def _told() -> tuple[object, ...]:
    rank = dist.get_rank()
    long = "x" * 4096 if rank % 2 else "y" * 4096
    found = by_store.of_all({"rank": rank}), by_store.of_all(long)
    first = by_store.from_first(rank + 7), by_store.to_first(rank * rank)
    for number in range(5):
        assert by_store.judged(number * rank, sum) == 6 * number
    aside, heard = by_store.Aside(), list[int]()
    assert aside.store is not store_of(None)[0], "a read of a TCPStore holds its connection"
    thread = threading.Thread(target=lambda: heard.extend(by_store.of_all(rank * 3, aside)))
    if rank:
        thread.start()
        time.sleep(0.3)
    # Others wait aside for rank 0, and that holds nobody up.
    assert by_store.of_all(rank) == list(range(RANKS))
    if not rank:
        thread.start()
    thread.join()
    assert heard == [0, 3, 6, 9]
    left = [f"{by_store._PREFIX}/{turn}/{name}" for turn in range(by_store._turns[""])
            for name in ("answer", "read", "done", *range(RANKS))]  # fmt: skip
    return found, first, [key for key in left if rank == 0 and store_of(None)[0].check([key])]


def test_every_rank_hears_every_rank() -> None:
    results = run_ranks(RANKS, _told)
    for rank, (found, first, left) in enumerate(results):
        assert found[0] == [{"rank": r} for r in range(RANKS)]
        assert [x[0] for x in found[1]] == ["y", "x", "y", "x"] and len(found[1][3]) == 4096
        assert first == (7, [0, 1, 4, 9] if rank == 0 else [])
        assert not left, "what was said is gone from the store"


def test_alone_nobody_is_asked() -> None:
    assert by_store.of_all(3) == [3] == by_store.to_first(3)
    assert by_store.from_first(3) == by_store.judged(3, sum) == 3
    by_store.meet()


def _late() -> None:
    store_of(None)[0].set_timeout(timedelta(seconds=0.5))
    if dist.get_rank() != 1:
        by_store.of_all(0)


def test_who_says_nothing_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 0 of 3 waits for rank 1 in an exchange"):
        run_ranks(3, _late)


def _uneven_groups() -> list[float]:
    """Ranks have unlike numbers of groups before they make one together, and no turn is shared."""
    rank, found = dist.get_rank(), []
    wanted = [(0, 1), (0, 1, 2), (2, 3), (0, 3), (1, 3)]
    for number, ranks in enumerate(wanted):
        if rank not in ranks:
            continue
        group = member_group(ranks, "gloo", f"test {number}")
        total = torch.tensor(float(1 + rank))
        dist.all_reduce(total, group=group)
        assert dist.get_process_group_ranks(group) == list(ranks)
        assert by_store.of_all(rank, group) == list(ranks)
        found.append(total.item())
    return found


def test_groups_are_made_by_their_members_alone() -> None:
    assert run_ranks(RANKS, _uneven_groups) == [[3, 6, 5], [3, 6, 6], [6, 7], [7, 5, 6]]
