"""Jobs of two and four ranks, on a GPU all on the same one: under NCCL's rules, through the host's
memory (`testing/nccl_rule.py`), as NCCL refuses to connect ranks that share a device. Kernels on
peers' memory work as on several GPUs."""

import os
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.codegen.lower.lower import lower
from meshwright.ir import launch
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.ir.placed import joint_kernels
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.torch_private import member_group
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from meshwright.testing.nccl_rule import run_under_rule
from meshwright.testing.plain import plain_step
from meshwright.testing.ring_layouts import with_rings
from meshwright.testing.spawn import alone, run_ranks
from tests.gpu.devices import DEVICES
from tests.runtime.joint_plans import MIDDLE, sequence_plan
from tests.traces import zoo_graph

STEPS, RATE = 2, 0.1
CHOICES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tp": 2},
        {"model": model_mesh({"cp": 2})},  # attention on a ring
        {"pp": 2, "schedule": "gpipe", "num_microbatches": 2},
        {"dp_shard": 2, "zero": 1, "num_microbatches": 2},
        {"dp_shard": 2, "zero": 3, "recompute": "full"},
    ],
    4: [
        {"pp": 2, "tp": 2, "schedule": "zero_bubble", "num_microbatches": 4},
        {"dp_shard": 2, "tp": 2, "zero": 2},
        {"pp": 2, "stage_dp": [3, 1], "schedule": "zero_bubble", "num_microbatches": 2},
    ],
}


def _has_ring(plan: Plan) -> bool:
    return plan.stages[0].mesh.get("cp", 1) > 1


def test_attention_on_two_ranks_goes_round() -> None:
    graph = zoo_graph(CASES["llama"], 8)
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64", optimizer="adam")
    plans = [
        build_plan(problem, uniform_choice(problem, **choice), predict=False)
        for choice in CHOICES[2]
    ]
    (ring,) = [with_rings(one, graph) for one in plans if _has_ring(one)]
    assert any("ring_attention" in program.source for program in lower(graph, ring, 0))


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", CHOICES)
@pytest.mark.parametrize("device", DEVICES)
def test_jobs_of_several_ranks_equal_one_process(device: str, ranks: int) -> None:
    """In float64, to rounding; what they are compared with is on the CPU."""
    case = CASES["llama"]
    graph = zoo_graph(case, 8)
    problem = make_problem(graph, mw.Cluster.local(ranks), precision="fp64", optimizer="adam")
    plans = [
        build_plan(problem, uniform_choice(problem, **choice), predict=False)
        for choice in CHOICES[ranks]
    ]
    planned = [(with_rings(one, graph) if _has_ring(one) else one, graph) for one in plans]
    found = check_each_equal(case, planned, steps=STEPS, run=run_under_rule, device=device)
    for choice, difference in zip(CHOICES[ranks], found, strict=True):
        assert difference.worst_of_both <= 1e-9, f"{choice}: {difference}"


@cache
def _fused() -> Graph:
    case = CASES["llama"]
    return mw.trace(
        case.model(torch.float32), case.example(dtype=torch.float32), case.loss_fn, kernels=KERNELS
    )


def _peer_plans(ranks: int) -> dict[str, Plan]:
    """Tensor parallelism whose sums meet a norm, and whose norms are split by tokens."""
    graph = _fused()
    return {
        "summed": sequence_plan(graph, {}, ranks, "fp32"),
        "split": sequence_plan(graph, MIDDLE, ranks, "fp32"),
    }


def _batches(dtype: torch.dtype) -> list[Any]:
    return [CASES["llama"].example(seed=seed, dtype=dtype) for seed in range(STEPS)]


def _through_peers(
    plans: list[Plan], graph: Graph, device: str
) -> list[tuple[list[float], dict[str, Tensor], dict[tuple[str, str], int]]]:
    """Losses, parameters, and which way the joint calls took, of each plan."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    found = []
    for plan in plans:
        before = Counter(launch.TAKEN)
        job = compile_job(
            CASES["llama"].model(torch.float32), plan, device=device, graph=graph, check=False,
            optimizer=lambda given: torch.optim.SGD(given, lr=RATE),
        )  # fmt: skip
        losses = [float(job.step(batch)) for batch in _batches(torch.float32)]
        state = full_state(job, everyone=True)
        job.close()
        taken = launch.TAKEN - before
        ways = {call: count for call, count in taken.items() if call[0] in joint_kernels()}
        found.append((losses, state, ways))
    return found


def _plainly() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = CASES["llama"].model()
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = [plain_step(model, None, optimizer, x) for x in _batches(torch.float64)]
    return losses, start, {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_on_peers_memory_train_as_one_process(device: str, ranks: int) -> None:
    """On the CPU the plain collectives stand in for them, which is said."""
    plans = _peer_plans(ranks)
    wanted, start, after = alone(_plainly)
    results = run_under_rule(ranks, _through_peers, [*plans.values()], _fused(), device)
    used = set()
    for number, name in enumerate(plans):
        for losses, state, ways in (result[number] for result in results):
            assert losses == pytest.approx(wanted, rel=1e-5), name
            ways_off = [
                float((state[key].double() - x).norm() / (x - start[key]).norm())
                for key, x in after.items()
            ]
            assert max(ways_off) <= 1e-2, name  # gains of 1 that went 1e-4 round so in float32
            whys = {why for _, why in ways}
            assert whys == ({""} if device == "cuda" else {"tensors are on cpu"}), ways
            used |= {kernel for kernel, _ in ways}
    assert used == set(joint_kernels())


def _member(rank: int, store: str, device: str) -> tuple[float, str]:
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.FileStore(store, 1), rank=rank, world_size=1)
    group = member_group([rank], backend, "of one rank")
    total = torch.full((3,), 2.0, device=device)
    dist.all_reduce(total, group=group)
    found = float(total.sum()), dist.get_backend_config(group)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_gpus_are_of_nccl_alone(device: str) -> None:
    """One rank is all that one GPU has for it."""
    ((total, backends),) = run_ranks(1, _member, device, init=False)
    assert total == 6.0 and ("gloo" in backends) is (device == "cpu")
