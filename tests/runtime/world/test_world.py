"""Which device and backend a process takes, with GPUs that are only said to be there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.ir.errors import MismatchError
from meshwright.ir.plan import plan_io
from meshwright.planner.problem.candidates import cluster_id
from meshwright.running.launch import where
from meshwright.runtime.world import world
from meshwright.runtime.world.world import (
    BACKEND,
    RankPlace,
    check_devices,
    join,
    pick_device,
    take,
)
from meshwright.testing.handmade import plan_of
from meshwright.testing.spawn import run_ranks
from tests.runtime.small_jobs import gpipe, stage


def say_gpus(monkeypatch: pytest.MonkeyPatch, count: int, *, uuids: str = "GPU-{}") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids.format(torch.device(device).index)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "kind", "gpus", "taken"),
    [
        (None, "cpu", 1, "cpu"),
        (None, "cuda", 1, "cuda:0"),
        (None, None, 1, "cuda:0"),
        (None, "cuda", 0, "cpu"),
        (None, None, 0, "cpu"),
        ("cpu", "cuda", 1, "cpu"),
        ("cuda", "cpu", 2, "cuda:0"),
        ("cuda:1", "cpu", 2, "cuda:1"),
    ],
)
def test_the_plan_says_on_what_it_runs(
    asked: str | None, kind: Any, gpus: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_gpus(monkeypatch, gpus)
    assert str(pick_device(asked, kind)) == taken


def test_a_plan_keeps_the_kind_of_its_devices() -> None:
    assert cluster_id(mw.Cluster.local(2)).device_kind == "cpu"
    gpus = cluster_id(mw.Cluster.preset("a100-40", num_nodes=1, devices_per_node=2))
    assert gpus.device_kind == "cuda"
    made = plan_of((stage(0, 3, (0,), shares=(24,)),), gpipe(1, 1), 1)
    assert '"device_kind"' not in plan_io.dumps(made), "plans of before have none"
    said = replace(made, cluster=gpus)
    assert plan_io.loads(plan_io.dumps(said)).cluster.device_kind == "cuda"
    assert where(torch.device("cpu"), made) == "cpu, no process group"
    assert where(torch.device("cpu"), said).endswith("; the plan is for a100-40:1x2")


@pytest.mark.parametrize(
    ("asked", "gpus", "own", "backend"),
    [
        (None, 0, "", "gloo"),
        ("cpu", 1, "", "gloo"),
        ("cuda", 1, "", "nccl"),
        (None, 1, "gloo", "gloo"),
    ],
)
def test_the_backend_is_what_was_asked_for(
    asked: str | None, gpus: int, own: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_gpus(monkeypatch, gpus)
    if own:
        monkeypatch.setenv(BACKEND, own)
    made: list[str] = []
    monkeypatch.setattr(world, "store_of_launcher", lambda timeout: (dist.HashStore(), 0, 2))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **settings: made.append(name))
    assert join(2, asked, 10.0) and made == [backend]


def _as_planned(rank: int, store: str, kinds: tuple[Any, ...]) -> list[str]:
    """Two jobs, one after the other, where there are GPUs; ranks but the first have no plan."""
    made: list[str] = []
    met = dist.FileStore(store, 2)
    with pytest.MonkeyPatch.context() as patch:
        say_gpus(patch, 2)
        patch.setattr(world, "store_of_launcher", lambda timeout: (met, rank, 2))
        patch.setattr(dist, "init_process_group", lambda name, **settings: made.append(name))
        for kind in kinds:
            assert join(2, None, 10.0, kind if rank == 0 else None)
    return made


def test_where_there_are_gpus_the_first_rank_s_plan_decides() -> None:
    """A plan for CPUs runs on them, by Gloo."""
    found = run_ranks(2, _as_planned, ("cpu", "cuda", None), init=False)
    assert found == [["gloo", "nccl", "nccl"]] * 2


def _without_a_backend() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
        try:
            take(torch.device("cpu"))
        except MismatchError as error:
            return str(error)
    return ""


def test_a_group_that_cannot_carry_the_job_is_refused() -> None:
    for text in run_ranks(2, _without_a_backend):
        assert "has no backend for cpu (cuda:nccl)" in text


def test_ranks_that_share_a_gpu_are_refused_under_nccl_only() -> None:
    shared = [RankPlace("here", "cuda", "GPU-1")] * 8 + [RankPlace("there", "cuda", "GPU-2")]
    with pytest.raises(MismatchError, match=r"8 ranks on here, 1 GPU: ranks 0 and 1 share one.*"
                       r"device='cpu'.*MESHWRIGHT_BACKEND=gloo"):  # fmt: skip
        check_devices(shared, by_nccl=True)
    check_devices(shared, by_nccl=False)
    check_devices([RankPlace("here", "cuda", f"GPU-{i}") for i in range(4)], by_nccl=True)
    check_devices([RankPlace("here", "cpu")] * 4, by_nccl=True)
    with pytest.raises(MismatchError, match="rank 1 is on cpu, rank 0 on cuda"):
        check_devices(
            [RankPlace("here", "cuda", "GPU-1"), RankPlace("there", "cpu")], by_nccl=False
        )


def _on_one_gpu(backends: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        # Each process sees one GPU, and under Slurm that need not be the same one.
        say_gpus(patch, 1, uuids="GPU-7" if "shared" in backends else f"GPU-{dist.get_rank()}")
        patch.setattr(dist, "get_backend_config", lambda: backends.removesuffix(" shared"))
        try:
            take(pick_device(None, "cuda"))
        except MismatchError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("backends", "refused"),
    [
        ("cpu:gloo,cuda:nccl shared", True),
        ("cpu:gloo,cuda:nccl", False),
        ("cpu:gloo,cuda:gloo shared", False),
    ],
)
def test_every_rank_hears_of_a_shared_gpu(backends: str, refused: bool) -> None:
    found = run_ranks(2, _on_one_gpu, backends)
    assert [text.startswith("2 ranks on") for text in found] == [refused] * 2


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    say_gpus(monkeypatch, 1)
    assert not join(1, None, 10.0)
    assert world.rank() == 0
    take(pick_device(None, "cuda"))
