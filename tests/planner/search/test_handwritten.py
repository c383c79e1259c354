"""Plans written by hand: every key becomes a pin or a setting, or is an error."""

import pytest

from meshwright.ir.errors import PlanError
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.search.complete import complete
from meshwright.planner.search.handwritten import check_devices, is_minimal, keys, parse_minimal
from tests.planner.problems import cluster, mlp

EXAMPLES = {
    "pp": 2, "num_microbatches": 4, "dp": 4, "dp_replicate": 2, "dp_shard": 2, "model": 2,
    "cp": 1, "ep": 1, "tp_depth": 1, "tp_row": 1, "tp_col": 1, "tp": 2, "zero": 1, "prefetch": 1,
    "schedule": "gpipe", "recompute": "full", "saved": "offload", "device_type": "t4",
    "compile": "true", "overlap": "block", "sync": "zero", "store": "zero",
    "memory": "60GB", "step": "1.5s", "global_batch_size": 64, "optimizer": "sgd",
    "precision": "fp32", "max_grad_norm": 1, "objective": "memory", "seed": 3,
    "style": "megatron", "samples": "own", "capture": "true",
    "constraints": ["block h.0 on stage 0"], "stages": [{"tp": 2}],
}  # fmt: skip


@pytest.mark.parametrize("key", [k for k in keys() if k != "micro_batch_size"])
def test_each_key_becomes_a_pin_or_a_setting(key):
    asked = parse_minimal({key: EXAMPLES[key]})
    assert len(asked.constraints) + len(asked.settings) == 1
    for text in asked.constraints:
        parse_constraint(text)


def test_megatrons_micro_batch_is_of_one_replica():
    given = {"dp_shard": 4, "dp_replicate": 2, "micro_batch_size": 2, "global_batch_size": 64}
    assert "num_microbatches=4" in parse_minimal(given).constraints
    with pytest.raises(PlanError, match="nearest is 48"):
        parse_minimal(given | {"global_batch_size": 50})
    with pytest.raises(PlanError, match="say the same"):
        parse_minimal(given | {"num_microbatches": 4})
    with pytest.raises(PlanError, match="needs dp_shard"):
        parse_minimal({"micro_batch_size": 2})


def test_stages_and_lists_are_pins_of_their_own():
    given = {"tp": [1, 2], "stages": [{"dp_shard": 3, "devices": [0, 1, 2]}, {"first": "h.4"}]}
    assert parse_minimal(given).constraints == (
        "tp in 1,2", "stage 0 dp_shard=3", "stage 0 devices 0,1,2", "block h.4 starts stage 1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_micro_batches": 4}, "nearest is 'num_microbatches'"),
        ({"stages": [{"pp": 2}]}, "stage 0: no such key 'pp'"),
        ({"stages": {"tp": 2}}, "must be a list of objects"),
        ({"tp": 2.0}, "tp is 2.0"),
        ({"tp": True}, "tp is True"),
        ({"seed": "one"}, "a whole number"),
        ({"constraints": "tp=2"}, "list of texts"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(PlanError, match=words):
        parse_minimal(given)


def test_sizes_beyond_the_cluster_name_the_nearest():
    check_devices({"pp": 2, "tp": 4, "dp_shard": 8, "dp": 8}, 64)
    with pytest.raises(PlanError, match=r"64 devices, the cluster has 48; nearest is dp_shard 6"):
        check_devices({"pp": 2, "tp": 4, "dp_shard": 8}, 48)


def test_whole_plans_are_told_from_plans_by_hand():
    assert is_minimal({"tp": 2}) and not is_minimal({"schema": "x"}) and not is_minimal([])


def test_what_is_left_open_is_searched():
    given = {"pp": 2, "schedule": "gpipe", "num_microbatches": 2, "tp": 1, "cp": 1,
             "recompute": "none", "precision": "fp32"}  # fmt: skip
    plan = complete(given, mlp(4), cluster(4))
    assert len(plan.stages) == 2 and plan.schedule.name == "gpipe" and plan.world_size == 4
    assert plan.predicted and plan == complete(given, mlp(4), cluster(4))


def test_a_graph_of_another_batch_is_refused():
    with pytest.raises(PlanError, match="traced at"):
        complete({"global_batch_size": 3}, mlp(), cluster(1))
