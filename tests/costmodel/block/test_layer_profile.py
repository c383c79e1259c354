"""Profiled layers through the graph, the planner's rules, the estimate and the search, by hand."""

from dataclasses import replace

import pytest

from meshwright.costmodel.block.layer_profile import layer_timer
from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import Link
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.verify import verify
from meshwright.ir.profile.layer_profile import LayerProfile, parse_layer_profile
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search

# Input -> a -> b -> b -> loss, a also to the second b. Milliseconds of 2 samples.
TEXT = """\
node1 -- Input -- forward_compute_time=0, backward_compute_time=0, activation_size=800, parameter_size=0
node2 -- a -- forward_compute_time=10, backward_compute_time=20, activation_size=8000, parameter_size=4000000
node3 -- b -- forward_compute_time=4, backward_compute_time=8, activation_size=8000, parameter_size=8000000
node4 -- b -- forward_compute_time=4, backward_compute_time=8, activation_size=8000, parameter_size=8000000
node5 -- loss -- forward_compute_time=2, backward_compute_time=4, activation_size=0, parameter_size=0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode2 -- node4
\tnode4 -- node5"""  # noqa: E501
RATE = 1e9


def tiny() -> LayerProfile:
    return parse_layer_profile(TEXT, "tiny", 2)


def cluster(size: int) -> Cluster:
    link = Link(name="wire", bandwidth_bytes_per_s=RATE, latency_s=0.0)
    # Memory that costs nothing: adding up gradients would blur figures made by hand.
    device = replace(presets.device("v100-16"), memory_bandwidth_bytes_per_s=1e15, overhead_s=0.0,
                     curves={}, reserved_bytes=0)  # fmt: skip
    node = Node(devices=(device.name,) * size, link=link)
    return Cluster(name="hand", device_types=(device,), nodes=(node,))


def planned(graph: Graph, size: int, **choice: object) -> Plan:
    problem = make_problem(graph, cluster(size), precision="fp32")
    return build_plan(problem, uniform_choice(problem, **choice))  # type: ignore[arg-type]


def test_the_graph_has_a_block_per_layer_and_equal_layers_share_a_pattern() -> None:
    graph = profiled_graph(tiny(), 8)
    assert [b.name for b in graph.blocks] == [
        "node1.Input", "node2.a", "node3.b", "node4.b", "node5.loss"]  # fmt: skip
    # The second b also reads a: another wiring, another pattern.
    assert len({b.pattern for b in graph.blocks}) == 5
    assert graph.tensors["node2.a:0"].shape == (8, 1000)
    assert [t.nbytes for t in graph.parameters] == [4_000_000, 8_000_000, 8_000_000]
    assert graph.blocks[3].inputs == ("node2.a:0", "node3.b:0")
    assert graph.fingerprint == profiled_graph(tiny(), 8).fingerprint
    assert graph.fingerprint != profiled_graph(tiny(), 16).fingerprint
    chain = parse_layer_profile(TEXT.replace("\tnode2 -- node4\n", ""), "chain", 2)
    patterns = [b.pattern for b in profiled_graph(chain, 8).blocks]
    assert patterns[2] == patterns[3] == "node3.b*"


def test_stage_times_are_the_layers_times_in_proportion_to_samples() -> None:
    graph = profiled_graph(tiny(), 8)
    plan = planned(graph, 3, pp=2, stage_dp=[2, 1], cuts=[3], num_microbatches=2)
    assert not verify(plan, graph, cluster(3))
    assert plan.predicted
    first, second = plan.predicted.stages
    # Micro-batches of 4: two replicas take 2 samples each, the single one takes 4.
    assert first.forward_s == pytest.approx(0.014, rel=1e-4)
    assert first.backward_s == pytest.approx(0.028, rel=1e-4)
    assert second.forward_s == pytest.approx(0.012, rel=1e-4)
    assert second.backward_s == pytest.approx(0.024, rel=1e-4)


def test_what_crosses_a_cut_are_the_live_tensors() -> None:
    graph = profiled_graph(tiny(), 8)
    tables = CostTables(graph, cluster(2), "fp32")
    # 4,000 bytes a sample of the layer before; at 3 also of a, which the last b reads. The input
    # is not sent.
    assert [tables.border_bytes(i) for i in (1, 2, 3, 4)] == [
        (0, 0), (32_000, 0), (64_000, 0), (32_000, 0)]  # fmt: skip
    plan = planned(graph, 2, pp=2, cuts=[3], num_microbatches=2)
    assert plan.predicted
    assert plan.predicted.stages[0].send_s == pytest.approx(4 * 8000 / RATE, rel=1e-3)


def test_replicas_all_reduce_their_parameters() -> None:
    graph = profiled_graph(tiny(), 8)
    plan = planned(graph, 4, dp_replicate=4)
    assert plan.predicted
    ring_s = 2 * 3 / 4 * 20_000_000 / RATE
    busy_s = 0.020 + 0.040
    assert busy_s < plan.predicted.step_s <= busy_s + ring_s + 0.002


def test_memory_is_state_and_what_layers_read_or_are_said_to_keep() -> None:
    plain = planned(profiled_graph(tiny(), 8), 2, pp=2, cuts=[3], num_microbatches=4).predicted
    assert plain
    memory = plain.stages[0].memory
    assert memory.parameters_bytes == memory.gradients_bytes == 12_000_000
    assert memory.optimizer_bytes == 24_000_000
    # Two micro-batches of 2 samples in flight: what b reads is kept.
    assert memory.activations_bytes >= 2 * 2 * 4000
    kept = profiled_graph(tiny(), 8, kept_bytes={"node2": 1_000_000})
    more = planned(kept, 2, pp=2, cuts=[3], num_microbatches=4).predicted
    assert more
    extra = more.stages[0].memory.activations_bytes - memory.activations_bytes
    assert extra == 2 * 2 * 1_000_000
    again = planned(kept, 2, pp=2, cuts=[3], num_microbatches=4, recompute="full").predicted
    assert again
    assert again.stages[0].memory.activations_bytes < 100_000
    assert again.stages[0].backward_s == pytest.approx(
        more.stages[0].backward_s + more.stages[0].forward_s, rel=1e-3
    )


def test_unknown_layers_and_empty_batches_are_refused() -> None:
    with pytest.raises(PlanError, match=r"no layers.*node9"):
        profiled_graph(tiny(), 8, kept_bytes={"node9": 1})
    with pytest.raises(PlanError, match="batch of 0"):
        profiled_graph(tiny(), 0)


def test_a_traced_graph_has_no_layer_timer() -> None:
    graph = profiled_graph(tiny(), 8)
    assert layer_timer(graph) is not None
    assert layer_timer(replace(graph, ops=())) is None


def test_a_profile_goes_through_the_search() -> None:
    graph = profiled_graph(tiny(), 8)
    plan = search(graph, cluster(4), precision="fp32", progress=False)
    assert not verify(plan, graph, cluster(4))
    assert plan.predicted
    assert plan.predicted.step_s < 8 * tiny().sample_s / 2
