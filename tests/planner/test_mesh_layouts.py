"""Layouts on meshes: as cheap as the frontier on one axis; legal and equal to the model on all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.graph.inner_traffic import sends
from meshwright.ir.graph.prelude import prelude_block
from meshwright.ir.layout.check_layout import layout_problems, tied_problems
from meshwright.ir.layout.layout import Shard, parse_placement, parse_strategy
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, param_key
from meshwright.ir.trace.declared import mix_experts
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.axis_layout import lay_out
from meshwright.planner.inside.axis_space import Spreader
from meshwright.planner.inside.choices import BlockProblem, Reader, ValueEdge, cost_of
from meshwright.planner.inside.choose import choose
from meshwright.planner.inside.data_layout import DataLayout, results, solve_data
from meshwright.planner.inside.factors import AxisKind
from meshwright.planner.inside.layout_objective import Regime, usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.inside.mesh_costs import op_seconds
from meshwright.planner.inside.mesh_problem import mesh_problem
from meshwright.planner.inside.mesh_space import mesh_space
from meshwright.planner.inside.moves import Moves
from meshwright.planner.inside.prices import AlphaBeta
from meshwright.planner.inside.variants import MeshVariants
from meshwright.planner.pins.placement_rules import NO_RULES
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.testing import tensor_forms as forms
from tests.codegen.equality import plan_of, run_plan
from tests.codegen.zoo import traced, wanted
from tests.planner.stored import stored_choices

CLUSTER = Cluster.preset("h100-sxm", num_nodes=2, devices_per_node=8)
MESHES: dict[str, ModelMesh] = {
    "tp": (("tp", 2),),
    "cp": (("cp", 2),),
    "ep": (("ep", 2),),
    "2d": (("tp_row", 2), ("tp_col", 2)),
    "cp x tp": (("cp", 2), ("tp", 2)),
    "3d": (("tp_depth", 2), ("tp_row", 2), ("tp_col", 2)),
}


@cache
def data_of(name: str) -> DataLayout:
    return solve_data(traced(name)[2])


@cache
def variants(name: str, mesh: str) -> MeshVariants:
    graph = traced(name)[2]
    tables = CostTables(graph, CLUSTER, "fp32")
    return MeshVariants(graph, tables, "adamw", data_of(name), MESHES[mesh], NO_RULES)


def frontier_cost(graph: Graph, data: DataLayout, tp: int) -> int:
    """Of all blocks, one pattern after the other, with whole borders; no parameter is shared."""
    spreader, kind, prices = Spreader(graph, data, (("tp", tp),)), AxisKind(tp), AlphaBeta()
    splits, shards = spreader.spread(kind)
    repeats = Counter(block.pattern for block in graph.blocks)
    total = 0
    for segment in spreader.segments:
        block = segment.block
        whole = parse_placement("R")
        given = {name: ((whole, 0),) for name in block.inputs} | {
            name: stored_choices(graph, name, tuple(shards.get(name, ())), tp, prices)
            for name in block.params
        }
        exits = dict.fromkeys(results(graph, block), whole)
        laid = lay_out(graph, segment, kind, splits, given, exits, prices)
        total += laid.cost * repeats[block.pattern]
    return total


@pytest.mark.parametrize("name", ["sequential", "llama", "vit", "resnet50", "vgg19", "dlrm"])
@pytest.mark.parametrize("tp", [2, 3])
def test_one_axis_costs_what_the_frontier_says(name: str, tp: int) -> None:
    graph, data, mesh = traced(name)[2], data_of(name), (("tp", tp),)
    space = mesh_space(graph, data, mesh)
    problem = mesh_problem(graph, space, Moves((tp,)), split_borders=False)
    found = choose(problem.choices(usual(mesh)))
    assert found.bound <= found.cost
    assert found.cost - found.bound <= 1e-6 * found.cost
    assert found.cost == pytest.approx(frontier_cost(graph, data, tp), rel=1e-6, abs=20)


RUN = [
    *((name, mesh) for name in ("gpt2", "llama", "vgg19") for mesh in ("tp", "cp", "2d")),
    ("t5", "tp"), ("mixtral", "ep"), ("mixtral", "2d"), ("llama", "cp x tp"), ("llama", "3d"),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "mesh"), RUN)
def test_every_variant_is_legal_and_computes_the_model(name: str, mesh: str) -> None:
    case, model, graph = traced(name)
    loss, grads = wanted(name)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    found = variants(name, mesh)
    assert found.names[0] == "" and len(set(found.names)) == len(found.names) <= 6
    for variant in found.names:
        layouts = found.found(variant).layouts
        by_pattern = {x.pattern: x for x in layouts}
        for block in (prelude_block(graph), *graph.distinct_blocks()):
            assert layout_problems(graph, block, by_pattern[block.pattern]) == []
        pairs = [(block, by_pattern[block.pattern]) for block in graph.blocks]
        assert tied_problems(graph, pairs) == []
        plan = plan_of(graph, layouts, (case.batch_size,))
        found_loss, found_grads = run_plan(model, graph, plan, flatten_batch(case.example()))
        torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
        for path, grad in found_grads.items():
            torch.testing.assert_close(grad, grads[path], rtol=0, atol=1e-12 * largest, msg=path)


@pytest.mark.parametrize(("name", "mesh"), [("llama", "cp"), ("mixtral", "ep"), ("llama", "ep")])
def test_only_experts_are_split_on_ep_and_nothing_on_cp(name: str, mesh: str) -> None:
    graph, found = traced(name)[2], variants(name, mesh)
    axis = MESHES[mesh][0][0]
    split = set[str]()
    for block in graph.distinct_blocks():
        layout = next(x for x in found.found("").layouts if x.pattern == block.pattern)
        for param in block.params:
            key = param_key(block, graph.tensors[param].fqn)
            if graph.tensors[param].kind is Kind.PARAMETER and isinstance(
                parse_placement(layout.parameters[key].get(axis, "R")), Shard
            ):
                split.add(key)
    assert all("experts" in key for key in split)
    assert bool(split) == (name == "mixtral" and axis == "ep")


@cache
def wide() -> Graph:
    """A llama of four layers of 1024 for 2048 tokens."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(8, 2048, dtype=torch.int64)
    return trace(model, {"input_ids": tokens, "labels": tokens})


def layer(layouts: Sequence[BlockLayout]) -> BlockLayout:
    return next(x for x in layouts if x.pattern == "model.layers.*")


def test_context_parallel_attention_is_a_ring() -> None:
    """Borders are split by sequence, and nothing but keys and values moves inside a layer. Each
    rank has an early and a late part, as the attention is causal; tensor axes split inside."""
    zigzag = "S(2,outer=2,zigzag)"
    for mesh in (MESHES["cp"], MESHES["cp x tp"]):
        found = layer(solve_layouts(wide(), mesh, usual(mesh), split_borders=True))
        assert found.inputs[0]["cp"] == found.outputs[0]["cp"] == "S(1,outer=2,zigzag)"
        attention = next(s["cp"] for key, s in found.ops.items() if "scaled_dot" in key)
        assert attention == f"{zigzag} {zigzag} {zigzag} -> {zigzag}"
    found = layer(solve_layouts(wide(), MESHES["cp"], usual(MESHES["cp"]), split_borders=True))
    assert {texts["cp"] for texts in found.parameters.values()} == {"R|P"}


def test_a_zigzag_is_shared_in_equal_parts_or_refused() -> None:
    mesh = MESHES["cp"]
    found = layer(solve_layouts(wide(), mesh, usual(mesh), split_borders=True))
    block = next(b for b in wide().distinct_blocks() if b.pattern == found.pattern)
    for text, said in (
        ("S(1,zigzag)", "has 1 sections, a zigzag an even number, as S(1,outer=2,zigzag)"),
        ("S(1,outer=2048,zigzag)", "must be a multiple of 4096, such as 4096"),
    ):
        odd = replace(found, inputs=({**found.inputs[0], "cp": text}, *found.inputs[1:]))
        assert any(said in problem for problem in layout_problems(wide(), block, odd))
    inside = replace(found, mesh={"tp": 3, "cp": 2}, inputs=(
        {"tp": "S(1)", "cp": "S(1,outer=3,zigzag)"}, *found.inputs[1:]))  # fmt: skip
    assert layout_problems(wide(), block, inside)


def test_borders_between_equal_blocks_are_equal() -> None:
    for variant in variants("gpt2", "2d").names:
        found = variants("gpt2", "2d").found(variant)
        layout = next(x for x in found.layouts if x.pattern == "transformer.h.*")
        assert layout.inputs[0] == layout.outputs[0]
        ops = [parse_strategy(text) for texts in layout.ops.values() for text in texts.values()]
        assert any(isinstance(p, Shard) for s in ops for p in s.inputs)


def test_layouts_depend_on_the_cluster() -> None:
    """Slow links are used less; equal problems have equal layouts."""

    def problem(nodes: int) -> Problem:
        machine = Cluster.preset("v100-16", num_nodes=nodes, devices_per_node=16 // nodes)
        return make_problem(wide(), machine, precision="fp32")

    mesh: ModelMesh = (("tp_row", 4), ("tp_col", 4))
    near, far = problem(1), problem(16)
    assert near.variants(mesh) == problem(1).variants(mesh)
    ours = [layer(p.layouts(mesh, "fast")) for p in (near, far)]
    assert ours[0] != ours[1]
    assert ours[0] == layer(problem(1).layouts(mesh, "fast"))


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(PlanError, match="nearest is 'fast'"):
        variants("llama", "tp").found("fst")


class Routed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 4)
        self.up, self.down = (torch.nn.Parameter(torch.zeros(4, *n)) for n in ((12, 8), (8, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return mix_experts(x, index, weights, self.up, self.down).pow(2).sum()


def test_messages_inside_ops_have_a_latency_for_all_samples() -> None:
    """And bytes for each of them."""
    graph, mesh = trace(Routed(), {"x": torch.zeros(8, 16, 8)}), MESHES["ep"]
    space = mesh_space(graph, solve_data(graph), mesh)
    (own,) = (space.ops[op.name] for op in graph.ops if sends(op))

    def seconds(samples: int, **prices: float) -> list[float]:
        free = AlphaBeta(flops_per_s=1e30, memory_bandwidth=1e30, **prices)
        return op_seconds(graph, own, space, Regime((free,), samples)).tolist()

    waits = [seconds(n, latency_s=1.0, bandwidth=1e30) for n in (1, 4)]
    assert waits[1] == pytest.approx(waits[0]) and max(waits[0]) > 1.0
    bytes_s = [seconds(n, latency_s=0.0, bandwidth=1.0) for n in (1, 4)]
    assert bytes_s[1] == pytest.approx([4 * s for s in bytes_s[0]], rel=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_a_layer_on_two_axes_equals_brute_force(seed: int) -> None:
    """Two or three states of each node, drawn from those of the real problem."""
    case = forms.case(batch=2, tokens=8, width=8, layers=1, bias=False)
    graph = trace(case.model(), case.example(), case.loss_fn)
    mesh = MESHES["2d"]
    space = mesh_space(graph, solve_data(graph), mesh)
    problem = mesh_problem(graph, space, Moves((2, 2)), split_borders=True)
    choices = problem.choices(usual(mesh, AlphaBeta(half_reduce=1.0)))
    random = np.random.default_rng(seed)
    kept = [
        np.sort(random.choice(len(costs), min(len(costs), 2 + (n % 3 == 0)), replace=False))
        for n, costs in enumerate(choices.costs)
    ]
    small = BlockProblem(
        tuple(costs[alive] for costs, alive in zip(choices.costs, kept, strict=True)),
        tuple(
            ValueEdge(
                link.source,
                link.made[kept[link.source]],
                tuple(Reader(r.node, r.wants[kept[r.node]]) for r in link.readers),
                link.price,
            )
            for link in choices.links
        ),
    )
    every = product(*(range(len(costs)) for costs in small.costs))
    best = min(cost_of(small, states) for states in every)
    found = choose(small)
    assert found.cost == best
    assert best - 1 <= found.bound <= best
