import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.testing.spawn import RankFailed, run_ranks


def _sum():
    value = torch.ones(3) * dist.get_rank()
    dist.all_reduce(value)
    return value


def _raise():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def _kill():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _sleep():
    time.sleep(60)


def test_results_come_back():
    for value in run_ranks(3, _sum):
        assert value.tolist() == [3.0, 3.0, 3.0]


def test_a_traceback_comes_back():
    with pytest.raises(RankFailed, match=r"rank 1: [\s\S]*ValueError: boom"):
        run_ranks(2, _raise)


def test_a_killed_rank_is_named():
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        run_ranks(2, _kill)


def test_a_hanging_rank_is_stopped(capfd):
    """And says where it hangs."""
    with pytest.raises(RankFailed, match="still running after 1 s"):
        run_ranks(2, _sleep, timeout_s=1.0)
    assert "in _sleep" in capfd.readouterr().err
