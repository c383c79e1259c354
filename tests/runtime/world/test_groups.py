"""Groups and sockets that processes really have are those that are counted of a plan."""

import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.costmodel.start_up import EXCHANGES, start_up
from meshwright.ir.comm import by_store
from meshwright.ir.comm.opening import OTHER_FILES
from meshwright.ir.errors import MismatchError
from meshwright.ir.plan.lines import border_pairs, line_of, stage_lines
from meshwright.ir.plan.plan import Plan
from meshwright.ir.torch_private import c10d, job_store
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.world.groups import make_groups
from meshwright.runtime.world.open_files import make_room, most_open
from meshwright.runtime.world.pairs import open_pairs
from meshwright.testing.handmade import plan_of
from meshwright.testing.nets import Net, net_plan
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.small_jobs import gpipe, stage

CPU = torch.device("cpu")


def meshes(*each: tuple[int, int, int]) -> Plan:
    """Stages of dp_replicate x dp_shard x tp."""
    stages, first = [], 0
    for index, (replicate, shard, tp) in enumerate(each):
        devices = tuple(range(first, first + replicate * shard * tp))
        first += len(devices)
        mesh = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
        share = 24 // (replicate * shard)
        stages.append(
            stage(index, index, devices, mesh=mesh, shares=(share,) * (replicate * shard))
        )
    return plan_of(tuple(stages), gpipe(len(stages), 1), 1)


PLANS = {
    "pp2 dp2": meshes((1, 2, 1), (1, 2, 1)),
    "pp2 dp1 and dp3": meshes((1, 1, 1), (1, 3, 1)),
    "tp2 dp2": meshes((1, 2, 2)),
    "pp4": meshes((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "HSDP 2x2 tp2": meshes((2, 2, 2)),
    "pp2 dp2 tp2": meshes((1, 2, 2), (1, 2, 2)),
    "pp2 dp4 tp1 and dp2 tp2": meshes((1, 4, 1), (2, 1, 2)),
}


def _sockets() -> int:
    """That this process has."""
    found = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(path).startswith("socket:") for path in found if os.path.islink(path))


def _opened(rank: int, file: str, plan: Plan, port: int) -> tuple[int, int, float]:
    """Sockets and groups of this rank, and what a sum and a message over each of them gave."""
    before = _sockets()
    store = dist.TCPStore(
        "127.0.0.1", port, plan.world_size, rank == 0, timeout=timedelta(seconds=60)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size)
    watched = job_store()  # as who looks for failures has one
    pairs = [pair for pair in border_pairs(plan) if rank in pair]
    groups = make_groups(plan, rank, CPU, pairs)
    open_pairs(groups, rank, CPU)
    own = next(s for s in plan.stages if rank in s.devices)
    total = 0.0
    for axis in stage_lines(own):
        if (group := groups.line(own, axis, rank)) is not None:
            x = torch.tensor(float(rank))
            dist.all_reduce(x, group=group)
            assert x == sum(line_of(own, axis, rank))
            total += float(x)
    counted = _sockets() - before, len(c10d._world.pg_names), total
    by_store.meet()
    groups.close()
    again = make_groups(plan, rank, CPU, pairs)  # the names of before are not used again
    open_pairs(again, rank, CPU)
    by_store.meet()
    del watched
    return counted


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANS)
def test_groups_and_sockets_are_those_counted(name: str) -> None:
    plan = PLANS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run_ranks(plan.world_size, _opened, plan, port, init=False)
    counted = start_up(_on_cpus(plan))
    assert max(groups for _, groups, _ in found) == counted.rank_groups
    sockets = [number for number, _, _ in found]
    sockets[0] -= 1 + counted.world_size * 2  # rank 0 has the store
    assert max(sockets) == counted.sockets == sockets[counted.busiest_rank]
    assert counted.store_sockets == 1 + counted.world_size * 2


def _on_cpus(plan: Plan) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, device_kind="cpu"))


def test_a_rank_s_line_is_the_one_of_all_that_has_it() -> None:
    for found in PLANS.values():
        for one in found.stages:
            for axis, lines in stage_lines(one).items():
                for line in lines:
                    assert all(line_of(one, axis, rank) == line for rank in line)


def _exchanges(given: Plan) -> int:
    before = by_store._turns[""]
    compile_job(Net(), given, lr=1e-3, check=False).close()
    return by_store._turns[""] - before


def test_a_job_starts_with_the_exchanges_that_are_counted() -> None:
    assert set(run_ranks(2, _exchanges, net_plan("zero1"))) == {EXCHANGES}


def _limited(soft: int, hard: int, sockets: Sequence[int]) -> list[int | str]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert most_open() == hard
    found: list[int | str] = []
    for number in sockets:
        try:
            make_room(number)
            found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        except MismatchError as error:
            found.append(str(error))
    return found


def test_a_process_makes_room_for_its_sockets_or_says_what_is_missing() -> None:
    fits, raised, refused = alone(_limited, 256, 512, (100, 400, 500))
    assert (fits, raised) == (256, 400 + OTHER_FILES)
    assert "500 sockets" in refused and "ulimit -n 564" in refused
