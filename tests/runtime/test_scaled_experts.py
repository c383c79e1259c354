"""Experts in products of 8-bit floats: ranks with some of them beside one process with all."""

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.apart_libraries import with_library
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks

WORDS, TOKENS, STEPS = 64, 32, 4
PINS = ("pp=1", "zero=0", "num_microbatches=1", "recompute=none")


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MixtralForCausalLM(MixtralConfig(
            vocab_size=WORDS, hidden_size=64, intermediate_size=512, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, max_position_embeddings=TOKENS, use_cache=False,
        ))  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids).logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _data() -> tuple[Tensor]:
    torch.manual_seed(1)
    return (torch.randint(WORDS, (16, TOKENS)),)


def _trained(plans: list[Plan], graph: Graph) -> list[tuple[list[float], int]]:
    found = []
    for plan in plans:
        job = compile_job(_Mixture(), plan, optimizer="sgd", lr=0.1, device="cpu", check=False,
                          graph=graph)  # fmt: skip
        losses = [float(job.step(_data())) for _ in range(STEPS)]
        found.append((losses, peak_of(job, _data())))
    return found


@pytest.mark.parametrize("precision", ["fp8-rowwise", "fp8-tensorwise", "fp8-rowwise-tokens"])
def test_ranks_with_some_experts_are_as_one_with_all(precision: str) -> None:
    with_library("torchao")
    graph = trace(_Mixture(), _data(), precision=precision)
    (op,) = [op for op in graph.ops if op.target.endswith("experts.default")]
    _, scaling, *tokens = precision.split("-")
    assert str(op.arg("form")).split() == [scaling, *(f"narrow_{word}" for word in tokens)]

    # Where no job could run nothing is planned; other stacks have kernels of their own.
    for gpu in ("b200", "mi300x"):
        with pytest.raises(PlanError, match=rf" of {gpu}: .* such as .*\.experts=bf16"):
            make_problem(graph, Cluster.preset(gpu, devices_per_node=2), precision=precision)
    make_problem(graph, Cluster.preset("h200", devices_per_node=2), precision=precision)
    make_problem(
        graph, Cluster.preset("b200", devices_per_node=2), precision=precision, style="automodel"
    )

    def planned(world: int, *pins: str) -> Plan:
        problem = make_problem(graph, Cluster.local(world), precision=precision, optimizer="sgd",
                               constraints=(*PINS, *pins))  # fmt: skip
        return search_problem(problem, "ilp")

    alone, split = planned(1), [planned(2, "ep=1", "dp_replicate=2"), planned(2, "ep=2")]
    ((wanted, one_peak),) = run_ranks(1, _trained, [alone], graph)[0]
    assert wanted[-1] < wanted[0] - 0.02
    assert alone.predicted is not None
    assert alone.predicted.stages[0].memory.tensor_bytes / one_peak == pytest.approx(1.0, abs=0.01)
    by_rank = run_ranks(2, _trained, split, graph)
    for number, plan in enumerate(split):
        assert plan.predicted is not None
        told = plan.predicted.stages[0].memory.tensor_bytes
        for rank in by_rank:
            losses, peak = rank[number]
            assert losses == pytest.approx(wanted, abs=1e-3)
            assert told / peak == pytest.approx(1.0, abs=0.01)
    # Ranks scale what they have; where experts lie changes nothing in that.
    assert by_rank[0][0][0] == pytest.approx(by_rank[0][1][0], abs=5e-5)
