"""Plans by hand whose stages have any model axes, on real ranks, against one process in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.codegen.lower.lower import lower
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing import tensor_forms as forms
from meshwright.testing.equality import LEARNING_RATE, check_equal
from meshwright.testing.models import ModelCase
from meshwright.testing.spawn import alone, run_ranks
from tests.model_axes import SEQUENCE, Part, plan_of, traced

PLANS: dict[str, tuple[tuple[Part, ...], dict[str, Any]]] = {
    "2d_recomputed": ((Part("2d", shares=(2,), recompute=True),), {"count": 2}),
    "2.5d": ((Part("2.5d"),), {"flat": True}),
    "3d": ((Part("3d", shares=(2,)),), {"count": 2}),
    "2d_zero1": ((Part("2d", shares=(3, 1), zero=1),), {}),
    "3d_recomputed": ((Part("3d", recompute=True),), {"flat": True}),
    "sequence_zero3": ((Part(SEQUENCE, shares=(1, 1), zero=3),), {"count": 2}),
    "sequence_to_sequence": (
        (Part(SEQUENCE, 2, (2,)), Part(SEQUENCE, 2, (1, 1))),
        {"count": 2, "schedule": "zero_bubble"},
    ),
    "2d_to_2d": ((Part("2d", 1, (2,)), Part("2d", 3, (2,))), {"count": 2, "flat": True}),
    "2d_to_1d": ((Part("2d", 2, (2,)), Part("1d", 2, (1, 1), zero=3)), {"count": 2}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANS)
def test_parallel_run_equals_the_single_process(name: str) -> None:
    parts, options = PLANS[name]
    case = forms.case(flat=options.get("flat", False))
    graph = traced(case)
    difference = check_equal(case, plan_of(graph, parts, **options), graph)
    assert difference.loss <= 1e-9 and difference.parameters <= 1e-9, str(difference)


@pytest.mark.parametrize(
    ("name", "at", "shape"),
    [("sequence_to_sequence", 2, (1, 2, 4)), ("2d_to_2d", 5, (4, 2)), ("2d_to_1d", 4, (1, 4, 4))],
)
def test_values_cross_split_between_equal_meshes_only(
    name: str, at: int, shape: tuple[int, ...]
) -> None:
    """`shape` is what rank `at` of the second stage receives."""
    parts, options = PLANS[name]
    graph = traced(forms.case(flat=options.get("flat", False)))
    (program,) = lower(graph, plan_of(graph, parts, **options), at)
    assert [value.shape for value in program.receives] == [shape]


def _train(
    case: ModelCase, plan: Plan, graph: Graph, batches: list[Any], source: Path | None, to: Path
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    job = compile_job(
        case.model(), plan, optimizer="adam", lr=LEARNING_RATE, device="cpu", graph=graph,
        max_grad_norm=0.1,
    )  # fmt: skip
    if source:
        job.load(source)
    norms, losses = [], []
    for batch in batches:
        losses.append(float(job.step(batch)))
        norms.append(float(job.grad_norm))  # type: ignore[arg-type]
    job.save(to)
    state = full_state(job)
    job.close()
    return losses, norms, state


def _clipped(case: ModelCase, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = case.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_norms_are_global_and_checkpoints_fit_other_meshes(tmp_path: Path) -> None:
    case = forms.case()
    graph = traced(case)
    batches = [case.example(seed=seed) for seed in range(4)]
    first = plan_of(graph, (Part("2.5d"),))
    second = plan_of(graph, (Part(SEQUENCE, shares=(3, 1), zero=1),))
    one, two = tmp_path / "one", tmp_path / "two"
    begun = run_ranks(8, _train, case, first, graph, batches[:2], None, one)
    ended = run_ranks(4, _train, case, second, graph, batches[2:], one, two)
    norms, state = alone(_clipped, case, batches)
    assert [*begun[0][1], *ended[0][1]] == pytest.approx(norms, rel=1e-9)
    for name, wanted in state.items():
        torch.testing.assert_close(ended[0][2][name], wanted, rtol=1e-9, atol=1e-12, msg=name)
