"""Predictions of whole plans: parts add up, and every choice moves the right figure."""

from dataclasses import asdict, replace

import pytest

from meshwright.costmodel.block import block_costs
from meshwright.costmodel.comm.comm import collective_time, group_levels
from meshwright.costmodel.cores import slowdown, step_cores
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.explain.breakdown import Bands, error_band
from meshwright.costmodel.memory.memory import optimizer_traffic, training_state
from meshwright.costmodel.ops.overheads import overheads_of
from meshwright.costmodel.simulate import compiled_schedule, run_ahead, simulate
from meshwright.costmodel.simulate.compiled_schedule import Table
from meshwright.costmodel.simulate.timeline import Ran, Times
from meshwright.costmodel.stage import stage_model
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.forms.sync import exchange
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Breakdown, Prediction
from meshwright.ir.presets import DEVICES, LINKS
from tests.costmodel.models import BATCH, HIDDEN, WIDTH, mlp, plan

CLUSTER = Cluster.preset("a100-80", num_nodes=2, devices_per_node=8)
PARAMS = 4 * 2 * WIDTH * HIDDEN * 4
"""Bytes of the four layers."""


def predict(made: Plan, cluster: Cluster = CLUSTER) -> Prediction:
    return estimate(mlp(), cluster, made)[0]


def test_one_rank() -> None:
    found, timeline = estimate(mlp(), CLUSTER, plan(CLUSTER))
    (stage,) = found.stages
    assert timeline.step_s == pytest.approx(2 * (stage.forward_s + stage.backward_s))
    assert found.step_s > timeline.step_s + stage.optimizer_s
    assert found.samples_per_s == pytest.approx(BATCH / found.step_s)
    assert stage.sync_s == stage.send_s == 0
    memory = stage.memory
    assert memory.parameters_bytes == memory.gradients_bytes == PARAMS
    assert memory.optimizer_bytes == 2 * PARAMS
    # The second backward begins: all gradients are there, and of one micro-batch x1 to x3, and h
    # and g of four layers. A new gradient of one weight is added to the old one, as those of what
    # the product read and made are there.
    assert memory.activations_bytes == 4 * 4 * (3 * WIDTH + 8 * HIDDEN)
    assert memory.workspace_bytes == 4 * 4 * (HIDDEN + WIDTH) + WIDTH * HIDDEN * 4
    assert memory.inputs_bytes == BATCH * WIDTH * 4
    assert found.peak_bytes == memory.used_bytes == memory.tensor_bytes
    assert memory.total_bytes - memory.used_bytes == CLUSTER.device(0).reserved_bytes


def test_a_backward_has_gradients_on_their_way_less_what_has_gone() -> None:
    """By hand: as fc2 runs backward there are the gradients of g and of y, which is that of what
    goes round, too; as gelu does, there are two more of HIDDEN, and g has gone."""
    made = plan(CLUSTER)
    tables = CostTables(mlp(), CLUSTER, made.precision)
    first, *others = stage_costs(tables, made, 0).cost.blocks
    assert {x.backward_bytes for x in (first, *others)} == {4 * 4 * (HIDDEN + WIDTH)}
    assert {x.workspace_bytes for x in (first, *others)} == {4 * 4 * 2 * HIDDEN}
    again = first.recomputed()
    assert again.backward_bytes == first.backward_bytes + first.saved_bytes


def test_pipeline_splits_parameters_and_sends() -> None:
    first, second = predict(plan(CLUSTER, pp=2)).stages
    assert first.memory.parameters_bytes == second.memory.parameters_bytes == PARAMS // 2
    assert first.send_s > 0 and second.send_s == 0
    apart = predict(plan(CLUSTER, pp=2, dp=8))
    assert apart.stages[0].send_s > 0


def test_gradients_are_summed_over_data_parallel() -> None:
    (stage,) = predict(plan(CLUSTER, dp=4)).stages
    levels = group_levels(range(4), CLUSTER)
    # One bucket, after the last block's backward; it goes on while the loss is summed.
    whole = collective_time(Primitive.ALL_REDUCE, PARAMS, levels)
    loss = collective_time(Primitive.ALL_REDUCE, 8, levels)
    zeros = overheads_of(CLUSTER.device(0)).copy_s(PARAMS)
    assert stage.sync_s == pytest.approx(whole - loss + zeros)
    # Flat gradients are always there: the peak is the first backward, with both in flight.
    assert stage.memory.activations_bytes == 2 * 4 * (3 * WIDTH + 8 * HIDDEN)


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer", "communication"),
    [
        (0, 1, 1, 2, 0),
        (1, 1, 1, 0.5, 1.25),  # packed flat, and this rank's part, while all are still there
        (2, 1, 1.25, 0.5, 1.25),  # also the sum of what has come so far
        # A block's parameters come, with their flat tensor; two blocks' gradients are on their way.
        (3, 0.25, 0.25, 0.5, 1.125),
    ],
)
def test_zero(
    zero: int, parameters: float, gradients: float, optimizer: float, communication: float
) -> None:
    (stage,) = predict(plan(CLUSTER, dp=4, zero=zero)).stages
    memory = stage.memory
    got = (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes)
    assert got == (PARAMS * parameters, PARAMS * gradients, PARAMS * optimizer)
    assert memory.communication_bytes == PARAMS * communication


def test_zero_3_gathers_every_micro_batch() -> None:
    times = [predict(plan(CLUSTER, dp=4, zero=z)).stages[0] for z in (0, 1, 2, 3)]
    assert times[1].forward_s == times[0].forward_s
    assert times[2].backward_s > times[1].backward_s
    assert times[3].forward_s > times[2].forward_s
    assert times[3].memory.total_bytes < times[0].memory.total_bytes


def test_recompute() -> None:
    full, again = predict(plan(CLUSTER)).stages[0], predict(plan(CLUSTER, recompute=True)).stages[0]
    assert again.memory.activations_bytes < full.memory.activations_bytes
    assert again.backward_s == pytest.approx(full.backward_s + full.forward_s)


def test_interleaved_stages_share_their_devices() -> None:
    rows = ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")
    made = plan(CLUSTER, pp=4, rows=rows)
    stages = tuple(
        type(s)(**{**{f: getattr(s, f) for f in s.__dataclass_fields__}, "devices": (i % 2,)})
        for i, s in enumerate(made.stages)
    )
    made = type(made)(
        **{**{f: getattr(made, f) for f in made.__dataclass_fields__}, "stages": stages}
    )
    found = predict(made)
    assert {s.memory.parameters_bytes for s in found.stages} == {PARAMS // 2}


def test_the_slowest_device_counts() -> None:
    def mixed(*names: str) -> Cluster:
        node = Node(devices=names, link=LINKS["pcie4"])
        # The model is so small that dispatch decides: the slow device has a slow CPU too.
        slower = {"l4": replace(DEVICES["l4"], overhead_s=3e-5)}
        types = tuple((DEVICES | slower)[name] for name in sorted(set(names)))
        return Cluster(name="m", device_types=types, nodes=(node,))

    fast, slow = mixed("h200", "h200"), mixed("h200", "l4")
    args = {"dp": 2, "precision": "fp32"}
    assert (
        predict(plan(slow, **args), slow).stages[0].forward_s  # type: ignore[arg-type]
        > predict(plan(fast, **args), fast).stages[0].forward_s  # type: ignore[arg-type]
    )


def test_processes_that_share_cores() -> None:
    node = Cluster.local(4).nodes[0]
    two = Node(devices=node.devices, link=node.link, cores=2)
    cluster = Cluster(name="l", device_types=Cluster.local(4).device_types, nodes=(two,))
    assert slowdown(cluster) == 2 and step_cores(cluster) == 2
    assert slowdown(CLUSTER) == 1 and step_cores(CLUSTER) == float("inf")
    _, alone = estimate(mlp(), cluster, plan(cluster))
    _, shared = estimate(mlp(), cluster, plan(cluster, pp=4))
    work = sum(e.end_s - e.start_s for row in shared.entries for e in row)
    assert work > alone.step_s * 0.99


def test_error_band_is_made_of_its_parts() -> None:
    found = predict(plan(CLUSTER))
    assert found.source == "datasheet" and 0.05 < found.error_band < 0.6
    local = Cluster.local(2)
    guessed = predict(plan(local), local)
    assert guessed.source == "assumption" and guessed.error_band > found.error_band
    one = Breakdown(rank=0, forward_s=1, backward_s=2, recompute_s=0, tensor_s=0, wait_s=0,
                    gradients_s=1, gather_s=0, optimizer_s=0, overhead_s=0)  # fmt: skip
    bands = Bands(compute=0.1, gradients=0.4, gather=0, optimizer=0)
    assert error_band(one, bands) == pytest.approx((0.3**2 + 0.4**2) ** 0.5 / 4)


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"dp": 4}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 2}, {"dp": 2, "tp": 2, "zero": 3},
        {"pp": 2, "dp": 2, "recompute": True}, {"pp": 4},
    ],
)  # fmt: skip
def test_the_breakdown_sums_to_the_step(asked: dict[str, int]) -> None:
    for cluster in (CLUSTER, Cluster.local(4)):
        found = predict(plan(cluster, **asked), cluster)  # type: ignore[arg-type]
        assert found.breakdown
        parts = {k: v for k, v in asdict(found.breakdown).items() if k != "rank"}
        assert sum(parts.values()) == pytest.approx(found.step_s)
        assert min(parts.values()) >= 0
        assert (parts["recompute_s"] > 0) == bool(asked.get("recompute"))
        assert (parts["tensor_s"] > 0) == ("tp" in asked)
        assert (parts["wait_s"] > 1e-12) >= ("pp" in asked)


def test_state_rounds_up_and_names_optimizers() -> None:
    state = training_state(
        110, 100, optimizer="sgd_momentum", exchange=exchange("zero3", 3), dp_shard=3
    )
    assert (state.parameters_bytes, state.gradients_bytes, state.optimizer_bytes) == (44, 34, 34)
    assert optimizer_traffic(25, "sgd") == 75
    with pytest.raises(PlanError, match=r"no optimizer 'lion'; nearest is 'muon'"):
        training_state(1, 1, optimizer="lion", exchange=exchange("zero0", 1), dp_shard=1)


def test_warm_tables_only_play_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No op is priced again, no action put in order, and one simulation is enough: ranks that wait
    for the first micro-batch may end their step later. benchmarks/simulator_speed.py has seconds.
    """
    cluster = Cluster.preset("h200", num_nodes=64)
    made = plan(cluster, num_layers=64, pp=8, dp=8, tp=8, num_microbatches=1)
    graph, tables = mlp(64), CostTables(mlp(64), cluster, "fp32")
    first = estimate(graph, cluster, made, tables)[0]
    played: list[object] = []

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("again")

    def counted(table: Table, times: Times) -> Ran:
        played.append(table)
        return run_ahead.run_ahead(table, times)

    monkeypatch.setattr(block_costs, "walk_block", refused)
    monkeypatch.setattr(compiled_schedule, "_compile", refused)
    monkeypatch.setattr(stage_model, "_make", refused)
    monkeypatch.setattr(simulate, "run_ahead", counted)
    assert estimate(graph, cluster, made, tables)[0] == first
    assert len(played) == 1
