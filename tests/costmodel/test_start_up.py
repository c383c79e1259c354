"""What the ranks of large plans open before the first step: counted, and bounded."""

import time
from dataclasses import replace

import pytest

from meshwright.costmodel.start_up import StartUp, start_up
from meshwright.ir.plan.plan import ClusterId, Plan
from meshwright.testing.handmade import plan_of
from tests.runtime.small_jobs import gpipe, stage

USUAL_LIMIT = 1024
"""Files that a process may have open where nobody has changed it."""


def large(kind: str, *, pp: int = 1, replicate: int = 1, shard: int = 1, tp: int = 1) -> Plan:
    """A plan of pp stages whose blocks nobody looks at."""
    each = replicate * shard * tp
    stages = tuple(
        stage(
            index, index, tuple(range(index * each, (index + 1) * each)),
            mesh={"dp_replicate": replicate, "dp_shard": shard, "tp": tp},
            shares=(1,) * (replicate * shard),
        )
        for index in range(pp)
    )  # fmt: skip
    made = plan_of(stages, gpipe(pp, 2), 2)
    cluster = ClusterId(name="large", fingerprint="", num_devices=pp * each, device_kind=kind)
    return replace(made, cluster=cluster)


@pytest.mark.parametrize(
    ("asked", "groups", "of_a_rank"),
    [
        # Of all; lines of tp, of dp_shard (dp is the same line); both directions of each pair.
        ({"shard": 64, "tp": 8}, 1 + 64 + 8, 3),
        ({"pp": 4, "shard": 32, "tp": 4}, 1 + 4 * (32 + 4) + 2 * 3 * 128, 7),
        ({"replicate": 8, "shard": 8, "tp": 8}, 1 + 64 + 64 + 64 + 8, 5),
        ({"pp": 8, "shard": 64, "tp": 8}, 1 + 8 * (64 + 8) + 2 * 7 * 512, 7),
        (
            {"pp": 16, "replicate": 16, "shard": 8, "tp": 8},
            1 + 16 * (128 + 64 + 128 + 8) + 2 * 15 * 1024,
            9,
        ),
    ],
    ids=["512", "512 in stages", "512 HSDP", "4096", "16384"],
)
def test_large_plans_for_gpus_are_bounded(
    asked: dict[str, int], groups: int, of_a_rank: int
) -> None:
    plan = large("cuda", **asked)
    begun = time.process_time()
    found = start_up(plan)
    assert time.process_time() - begun < 10.0
    assert (found.groups, found.rank_groups) == (groups, of_a_rank)
    assert found.sockets < USUAL_LIMIT - 64, "no rank needs more than what is usual"
    # Sockets of a rank depend on its axes and not on how many ranks there are.
    assert found.sockets <= 133 * 5 + 7 * 4 + 3
    assert found.store_operations < 64 * plan.world_size
    assert found.seconds < (60.0 if plan.world_size > 10_000 else 15.0)
    assert [f.rule for f in found.findings(USUAL_LIMIT) if f.severity == "error"] == []
    (store,) = found.findings(USUAL_LIMIT)
    assert store.nearest.startswith(f"ulimit -n {1 + 3 * plan.world_size + 64}")


def test_gloo_connects_all_with_all_and_that_is_said() -> None:
    found = start_up(large("cpu", shard=512, tp=8))
    assert found.sockets == 4096 + 512 + 8 + 2
    rules = {f.rule: f for f in found.findings(USUAL_LIMIT)}
    assert rules["open files"].severity == "error"
    assert "4618 sockets" in rules["open files"].message
    assert "ulimit -n 4682" in rules["open files"].nearest
    assert not list(start_up(large("cpu", shard=4, tp=2)).findings(USUAL_LIMIT))


def test_stages_of_unequal_replicas_have_the_pairs_that_exchange_samples() -> None:
    stages = stage(0, 0, (0, 1), shares=(12, 12)), stage(1, 1, (2, 3, 4), shares=(8, 8, 8))
    plan = plan_of(stages, gpipe(2, 1), 1)
    # 0 has samples of 2 and 3, 1 of 3 and 4: four pairs, both ways.
    assert start_up(plan).groups == 1 + 2 + 8
    assert start_up(plan, pairs=[(0, 2), (2, 0)], more=[(0, 4)]).groups == 1 + 2 + 1 + 2
    assert start_up(plan_of((stage(0, 1, (0,), shares=(24,)),), gpipe(1, 1), 1)) == StartUp(
        1, 0, 0, 0, 0, 0, 0, 0.0
    )
