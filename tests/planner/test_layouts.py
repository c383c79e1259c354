"""The layouts that the solver finds for the zoo, and the solver against brute force."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.graph.prelude import prelude_block
from meshwright.ir.layout.check_layout import layout_problems, tied_problems
from meshwright.ir.layout.layout import RP, P, Placement, R, Shard, Strategy
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, model_mesh, param_key
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.explain import batch_coupling, batch_norms, moves, why_whole
from meshwright.planner.inside.frontier import OpChain, OpCosts, solve
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.testing.models import CASES
from tests.traces import zoo_graph


@cache
def graph_of(name: str) -> Graph:
    case = CASES[name]
    return zoo_graph(case, 8, torch.float32)


def tp_mesh(size: int) -> ModelMesh:
    return model_mesh({"tp": size})


def block_of(graph: Graph, layout: BlockLayout) -> Block:
    blocks = [prelude_block(graph), *graph.distinct_blocks()]
    return next(block for block in blocks if block.pattern == layout.pattern)


def traffic(graph: Graph, layout: BlockLayout) -> Counter[str]:
    """How often each collective runs on tp, forward (F) and backward (B)."""
    found: Counter[str] = Counter()
    for move in moves(graph, block_of(graph, layout), layout, "tp"):
        for way, primitive in zip("FB", move.primitives, strict=False):
            found[f"{way} {primitive}"] += 1
    return Counter(
        {k: n for k, n in found.items() if k.split()[1] not in ("identity", "pad", "slice")}
    )


def layer(graph: Graph, pattern: str, tp: int = 2) -> BlockLayout:
    return next(x for x in solve_layouts(graph, tp_mesh(tp)) if x.pattern == pattern)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_layouts_are_consistent(name: str, tp: int) -> None:
    graph = graph_of(name)
    layouts = solve_layouts(graph, tp_mesh(tp))
    assert [x.pattern for x in layouts] == [
        "(prelude)", *(block.pattern for block in graph.distinct_blocks())
    ]  # fmt: skip
    for layout in layouts:
        assert layout_problems(graph, block_of(graph, layout), layout) == []
    by_pattern = {layout.pattern: layout for layout in layouts}
    pairs = [(block, by_pattern[block.pattern]) for block in graph.blocks]
    assert tied_problems(graph, pairs) == []
    assert solve_layouts(graph, tp_mesh(tp)) == layouts
    assert batch_coupling(graph, layouts) == ()


def test_gpt2_block_is_column_then_row() -> None:
    graph = graph_of("gpt2")
    found = layer(graph, "transformer.h.*")
    assert traffic(graph, found) == {"F all_reduce": 2, "B all_reduce": 2}
    strategy = {key: axes["tp"] for key, axes in found.ops.items() if "tp" in axes}
    assert strategy["attn.c_attn/addmm"] == "S(0,outer=3) R|P S(1,outer=3) -> S(1,outer=3)"
    assert strategy["attn/split"] == "S(2,outer=3) -> S(2) S(2) S(2)"
    assert strategy["attn/scaled_dot_product_attention"].endswith("-> S(1)")
    assert strategy["attn.c_proj/addmm"] == "P S(1) S(0) -> P"
    assert strategy["mlp.c_fc/addmm"] == "S(0) R|P S(1) -> S(1)"
    assert strategy["mlp.c_proj/addmm"] == "P S(1) S(0) -> P"
    assert found.inputs[0] == {"dp": "S(0)"} and found.outputs == ({"dp": "S(0)"},)


def test_heads_are_shared_unevenly() -> None:
    """GPT-2-XL has 25 heads of 64."""
    config = GPT2Config(
        vocab_size=500, n_embd=1600, n_head=25, n_layer=2, use_cache=False, loss_type="ForCausalLM"
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    tokens = torch.zeros(2, 1024, dtype=torch.int64)
    graph = trace(model, {"input_ids": tokens, "labels": tokens})
    found = layer(graph, "transformer.h.*")
    assert found.ops["attn/scaled_dot_product_attention"]["tp"].endswith("-> S(1)")
    assert found.parameters["attn.c_attn.weight"]["tp"] == "S(1,outer=3,inner=64)"
    assert found.parameters["attn.c_proj.weight"]["tp"] == "S(0,inner=64)"


def test_tied_vocabulary_is_split_in_both_places() -> None:
    graph = graph_of("gpt2")
    layouts = solve_layouts(graph, tp_mesh(2))
    stored = {
        axes["tp"]
        for layout in layouts
        for key, axes in layout.parameters.items()
        if key in ("weight", "transformer.wte.weight") and "tp" in axes
    }
    assert stored == {"S(0)"}
    head = layouts[-1]
    assert head.ops["/linear"]["tp"] == "R|P S(0) -> S(2)"
    assert head.ops["/cross_entropy_sum"]["tp"] == "S(1) R -> R"


def test_llama_splits_query_and_key_heads_together() -> None:
    graph = graph_of("llama")
    found = layer(graph, "model.layers.*")
    assert traffic(graph, found) == {"F all_reduce": 2, "B all_reduce": 2}
    tp = {key: axes.get("tp", "R") for key, axes in found.parameters.items()}
    assert all(tp[f"self_attn.{x}_proj.weight"] == "S(0)" for x in "qkv")
    assert tp["self_attn.o_proj.weight"] == "S(1)" and tp["mlp.down_proj.weight"] == "S(1)"
    assert tp["input_layernorm.weight"] == "R"


def test_mixtral_splits_experts() -> None:
    graph = graph_of("mixtral")
    found = layer(graph, "model.layers.*")
    experts = next(axes["tp"] for key, axes in found.ops.items() if "experts" in key)
    assert experts.endswith("-> P")
    split = [key for key, axes in found.parameters.items() if axes.get("tp", "R").startswith("S")]
    assert {key.rpartition(".")[2] for key in split if "experts" in key} == {
        "gate_up_proj",
        "down_proj",
    }


@pytest.mark.parametrize(
    ("name", "pattern"), [("vit", "vit.layers.*"), ("bert_mlm", "bert.encoder.layer.*")]
)
def test_encoders_are_column_then_row(name: str, pattern: str) -> None:
    graph = graph_of(name)
    assert traffic(graph, layer(graph, pattern)) == {"F all_reduce": 2, "B all_reduce": 2}


def test_t5_splits_the_bias_with_the_heads() -> None:
    graph = graph_of("t5")
    for layout in solve_layouts(graph, tp_mesh(2)):
        for key, axes in layout.ops.items():
            if "scaled_dot_product_attention" in key:
                inputs = axes["tp"].split("->")[0].split()
                assert inputs[:3] == ["S(1)"] * 3
                assert len(inputs) < 4 or inputs[3] in ("S(1)", "R")


def test_dlrm_tables_are_split() -> None:
    graph = graph_of("dlrm")
    tables = [x for x in solve_layouts(graph, tp_mesh(2)) if x.pattern.startswith("tables")]
    stored = [
        axes.get("tp", "R") for x in tables for k, axes in x.parameters.items() if k == "weight"
    ]
    assert tables and all(text in ("S(0)", "S(1)") for text in stored)


def test_the_count_of_tokens_is_a_total() -> None:
    prelude = solve_layouts(graph_of("gpt2"), tp_mesh(1))[0]
    assert prelude.ops["/count_valid"] == {"dp": "S(0) -> P"}


def test_what_cannot_be_split_is_said() -> None:
    graph = graph_of("gnmt")
    reasons = why_whole(graph, solve_layouts(graph, tp_mesh(2)))
    assert any("lstm is computed whole on each rank: it has no rule" in r for r in reasons)
    assert why_whole(graph, solve_layouts(graph, tp_mesh(1))) == ()


def test_batch_norm_is_noted() -> None:
    assert "num_microbatches" in batch_norms(graph_of("resnet50"))[0]
    assert batch_norms(graph_of("gpt2")) == ()


class Coupled(torch.nn.Module):
    """Every sample is compared with the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return torch.tanh(y - y.mean(0))


def test_coupled_samples_are_reported() -> None:
    batch = (torch.randn(8, 4), torch.randn(8, 4))
    graph = trace(Coupled(), batch, torch.nn.functional.mse_loss)
    reasons = batch_coupling(graph, solve_layouts(graph, tp_mesh(1)))
    assert len(reasons) == 1 and "which is P on dp" in reasons[0]
    assert "test_layouts.py" in reasons[0]


def test_broken_layouts_are_found() -> None:
    graph = graph_of("gpt2")
    good = layer(graph, "transformer.h.*")
    block = block_of(graph, good)

    def problems(key: str, axis: str, text: str) -> list[str]:
        ops = {**good.ops, key: {**good.ops.get(key, {}), axis: text}}
        return layout_problems(graph, block, replace(good, ops=ops))

    torn = "S(0,outer=2)"
    assert "is not one of" in problems("attn/split", "tp", "Q -> S(2) S(2) S(2)")[0]
    assert "3" in problems("attn/split", "tp", "S(2) -> S(2)")[0]
    assert "of 3 dims" in problems("attn/split", "tp", "S(5) -> S(2) S(2) S(2)")[0]
    assert "do not nest" in problems("attn/split", "tp", f"{torn} -> {torn} {torn} {torn}")[0]
    assert "has no op" in problems("nowhere", "tp", "R -> R")[0]
    assert "R|P is meant" in problems("ln_1/layer_norm", "tp", "R R R -> R|P")[0]
    assert "do not nest" in layout_problems(
        graph, block, replace(good, outputs=({"dp": "S(0)", "tp": torn},))
    )[0]  # fmt: skip
    key = param_key(block, "transformer.h.0.mlp.c_fc.weight")
    stored = {**good.parameters, key: {"dp": "S(0)"}}
    assert "stored whole" in layout_problems(graph, block, replace(good, parameters=stored))[0]


PLACES: tuple[Placement, ...] = (R, RP, P, Shard(0), Shard(1))


def random_run(seed: int) -> OpChain:
    """A small random dag of ops with random strategies and prices that obey the triangle rule."""
    rng = random.Random(seed)
    names = ["x"]
    steps = []
    for i in range(5):
        inputs = tuple(rng.choices(names, k=rng.choice([1, 1, 2])))
        drawn = (
            Strategy(tuple(rng.choices(PLACES, k=len(inputs))), (rng.choice(PLACES),))
            for _ in range(3)
        )
        strategies = tuple(dict.fromkeys(drawn))
        costs = tuple(rng.randrange(20) for _ in strategies)
        steps.append(OpCosts(inputs, (f"v{i}",), strategies, costs))
        names.append(f"v{i}")
    height = {place: rng.randrange(8) for place in PLACES}

    def price(name: str, source: Placement, target: Placement) -> int:
        return 3 + abs(height[source] - height[target])

    given = {"x": ((R, 0), (Shard(0), 2))}
    return OpChain(tuple(steps), given, {"v4": R, "v2": Shard(1)}, price)


def cost_of(run: OpChain, start: Placement, chosen: tuple[Strategy, ...]) -> int:
    placed = {"x": start}
    total = dict(run.given["x"])[start] if any("x" in s.inputs for s in run.steps) else 0
    paid: set[tuple[str, Placement]] = set()

    def need(name: str, target: Placement) -> int:
        if placed[name] == target or (name, target) in paid:
            return 0
        paid.add((name, target))
        return run.price(name, placed[name], target)

    for step, strategy in zip(run.steps, chosen, strict=True):
        total += step.costs[step.strategies.index(strategy)]
        total += sum(need(n, t) for n, t in zip(step.inputs, strategy.inputs, strict=True))
        placed |= dict(zip(step.outputs, strategy.outputs, strict=True))
    return total + sum(need(name, target) for name, target in run.exits.items())


@pytest.mark.parametrize("seed", range(40))
def test_the_solver_equals_brute_force(seed: int) -> None:
    run = random_run(seed)
    best = min(
        cost_of(run, start, chosen)
        for start, _ in run.given["x"]
        for chosen in product(*(step.strategies for step in run.steps))
    )
    found = solve(run)
    assert found.cost == best
    assert cost_of(run, found.placed.get("x", R), found.chosen) == best


class _SummedInBlocks(torch.nn.Module):
    """Adds a term to the loss in each block, or at the end of all that blocks hand on."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms: list[torch.Tensor] = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            terms.append(x if self.late else x.pow(2).mean())
        added = terms[0].pow(2).mean() if self.late else terms[0]
        for term in terms[1:]:
            added = added + (term.pow(2).mean() if self.late else term)
        return x.sum(1).mean() + added


def test_a_term_of_the_loss_that_blocks_add_up_is_told_where_it_may_be_summed() -> None:
    (reason, *_) = batch_coupling(
        early := trace(_SummedInBlocks(late=False), (torch.ones(4, 8),)),
        solve_layouts(early, tp_mesh(1)),
    )
    assert "hands on" in reason and "may be summed at the end of forward" in reason
    late = trace(_SummedInBlocks(late=True), (torch.ones(4, 8),))
    assert not batch_coupling(late, solve_layouts(late, tp_mesh(1)))
