"""Plans with fused kernels, run: equal to the model as it is written, whatever is split."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.forms.flat import ShardedBucket
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Fusion, Graph, Missed
from meshwright.ir.kernels import KERNELS, is_placed
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.kernels import asked_kernels
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import run_ranks
from tests.codegen.quick import QUICK
from tests.runtime.fused_graphs import BATCH, graph_of

PLANS = [
    ("llama", {"tp": 2, "num_microbatches": 2}),
    ("llama", {"dp_shard": 3, "zero": 3, "recompute": "full", "num_microbatches": 1}),
    ("llama", {"pp": 2, "tp": 2, "num_microbatches": 3}),
    ("gpt2", {"tp": 2, "dp_replicate": 2, "num_microbatches": 2}),
    ("bert_mlm", {"pp": 2, "num_microbatches": 2}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "asked"), PLANS, ids=lambda value: str(value))
def test_equal_to_the_model_as_written(name, asked):
    graph = graph_of(name)
    devices = 1
    for axis in ("pp", "tp", "dp_replicate", "dp_shard"):
        devices *= asked.get(axis, 1)
    problem = make_problem(graph, mw.Cluster.local(devices), precision="fp64")
    plan = build_plan(problem, uniform_choice(problem, **asked))
    assert any(f.places for f in plan.kernels)
    found = check_equal(CASES[name], plan, graph, steps=3)
    assert found.worst_of_both <= 1e-9, found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_buckets_of_a_kernel_are_those_without(zero):
    """Rows that ranks share unevenly, two replicas of the shards, several buckets."""
    graph = graph_of("bert_mlm")
    problem = make_problem(graph, mw.Cluster.local(4), precision="fp64")
    choice = uniform_choice(problem, dp_replicate=2, dp_shard=2, zero=zero, num_microbatches=2)
    plan = build_plan(problem, choice)
    assert Fusion("bucket", 1) in plan.kernels
    found = check_equal(CASES["bert_mlm"], plan, graph, steps=3)
    assert found.worst_of_both <= 1e-9, found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("optimizer", "asked"),
    [
        ("adamw", {"dp_shard": 2, "zero": 2}),
        ("sgd", {"dp_shard": 2, "zero": 1}),
        ("sgd_momentum", {"dp_replicate": 2}),
        ("adam", {"dp_shard": 2, "zero": 3}),
    ],
)
def test_steps_of_a_kernel_are_those_without(optimizer, asked):
    """With gradients that are clipped, and batches that are accumulated and scaled."""
    graph = graph_of("bert_mlm")
    problem = make_problem(
        graph, mw.Cluster.local(2), precision="fp64", optimizer=optimizer, max_grad_norm=0.05
    )
    plan = build_plan(problem, uniform_choice(problem, num_microbatches=2, **asked))
    assert Fusion("bucket_update", 1) in plan.kernels
    others = tuple(f for f in plan.kernels if f.kernel != "bucket_update")
    plain = replace(plan, kernels=others)
    (ours, norms, kinds, packed), (theirs, wanted, plain_kinds, plain_packed) = (
        run_ranks(2, stepped, p, graph)[0] for p in (plan, plain)
    )
    # What the step has written is gathered from there.
    assert packed == 0 and (plain_packed > 0) is (asked.get("zero") in (1, 2))
    # Gradients of one dtype are stepped at once.
    assert kinds == {("bucket_update", "torch", "tensors are on cpu"): 3} and not plain_kinds
    assert min(wanted) > 0.05
    assert norms == pytest.approx(wanted, rel=1e-9)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)


Calls = dict[tuple[str, str, str], int]


def stepped(plan: mw.Plan, graph: Graph) -> tuple[dict[str, torch.Tensor], list[float], Calls, int]:
    """Parameters and gradients' norms after some steps, what the record of the run says of the
    kernel that took them, and how often parameters were packed."""
    packed, pack = [], ShardedBucket.pack_shards

    def counted(bucket: ShardedBucket, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        packed.append(bucket)
        return pack(bucket, shards)

    ShardedBucket.pack_shards = counted  # type: ignore[method-assign]
    case = CASES["bert_mlm"]
    job = mw.compile(case.model(), plan, lr=1e-2, loss_fn=case.loss_fn, graph=graph, device="cpu")
    norms = []
    for seed in range(3):
        batch = case.batch(BATCH, torch.Generator().manual_seed(seed))
        job.accumulate(batch)
        job.accumulate(batch)
        job.apply(0.5)
        norms.append(float(job.grad_norm))
    state, kernels = full_state(job), job.measured().kernels
    assert {"layer_norm", "bias_gelu"} <= {one.kernel for one in kernels}
    job.close()
    updates = [one for one in kernels if one.kernel == "bucket_update"]
    calls = {(one.kernel, one.way, one.why): one.calls for one in updates}
    return state, norms, calls, len(packed)


def test_places_that_follow_from_the_layout():
    """What travels, and what is packed: said by the plan, with what is not and why."""
    graph = graph_of("mixtral")
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    axes = (("ep", 2),)
    problem.solved[axes, ""] = solve_layouts(graph, axes, usual(axes, QUICK))
    plan = build_plan(problem, uniform_choice(problem, model=axes, num_microbatches=2))
    experts = sum(op.target == "meshwright.experts.default" for op in graph.ops)
    assert Fusion("route", experts) in plan.kernels and Fusion("bucket", 0) in plan.kernels
    found = check_equal(CASES["mixtral"], plan, graph, steps=3)
    assert found.worst_of_both <= 1e-9, found
    spread = build_plan(problem, uniform_choice(problem, dp_replicate=2))
    why = "its gradients lie side by side in one buffer already, so nothing is packed"
    assert Fusion("bucket", 0, (Missed("stage 0", why, 1),)) in spread.kernels
    assert Fusion("route", 0) in spread.kernels


def test_the_plan_says_what_to_trace(tmp_path):
    case = CASES["llama"]
    cluster = mw.Cluster.preset("a100-40", devices_per_node=2)
    plan = mw.search(
        case.model(), cluster, example_inputs=case.example(), kernels="auto", precision="fp32",
        progress=False,
    )  # fmt: skip
    assert {f.kernel for f in plan.kernels if f.places} >= {"rms_norm", "rotary", "swiglu"}
    assert "fused kernels: " in str(plan) and " x0" not in str(plan)
    assert "rms_norm x9" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    # Alone, the plan's graph is traced again with its kernels.
    assert plan.world_size == 2 and not plan.verify()


def test_only_what_pays_on_a_device():
    case = CASES["bert_mlm"]
    cluster = mw.Cluster.local(2)
    (device,) = cluster.device_types
    # Where dispatch costs nothing and memory is quick, a CPU gains nothing by a kernel it lacks.
    free = replace(cluster, device_types=(replace(device, overhead_s=0.0),))
    norms, gpu = (
        next(f for f in plan.kernels if f.kernel == "layer_norm")
        for plan in (
            mw.search(
                case.model(), where, example_inputs=case.example(), kernels="auto",
                precision="fp64", progress=False,
            )
            for where in (free, mw.Cluster.preset("a100-40", devices_per_node=2))
        )
    )  # fmt: skip
    assert gpu.places == 8 and not gpu.missed
    assert norms.places == 0 and sum(m.places for m in norms.missed) == 8
    assert all(f"times as long on {device.name}" in miss.why for miss in norms.missed)


def test_names_of_several_kernels():
    asked = {name: asked_kernels(name) for name in ("none", "torch", "auto", "all", "swiglu, gelu")}
    assert asked["none"] == () and asked["torch"] == ("gelu",)
    assert asked["all"] == asked["auto"] == KERNELS
    assert asked["swiglu, gelu"] == ("gelu", "swiglu")


def test_a_plan_that_declined_kernels_is_obeyed():
    """The model is traced again with those that were put in, and those only."""
    case = CASES["bert_mlm"]
    plan = mw.search(
        case.model(), mw.Cluster.local(1), example_inputs=case.example(), kernels="auto",
        precision="fp32", progress=False,
    )  # fmt: skip
    assert any(miss.declined for fusion in plan.kernels for miss in fusion.missed)
    job = mw.compile(case.model(), plan)
    traced = [
        [f for f in fs if not is_placed(f.kernel)] for fs in (job.graph.fusions, plan.kernels)
    ]
    assert traced[0] == traced[1]
    job.close()


def test_a_graph_keeps_the_kernels_that_it_has():
    with pytest.raises(PlanError, match="put in while a model is traced"):
        mw.search(graph_of("llama"), mw.Cluster.local(2), kernels="all", progress=False)
