"""The driver: budget, interruption, evidence, bad inputs, what to do when nothing fits."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.ir import deadline
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import Link
from meshwright.ir.errors import Infeasible, MeshwrightError, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import dumps
from meshwright.ir.plan.show import to_text
from meshwright.planner.pins.decisions import Scope
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.found import SearchLog
from meshwright.planner.search.infeasible import explain, plain_reason
from meshwright.planner.search.offers import Offer, find_searcher
from meshwright.planner.search.search import search, search_problem
from meshwright.planner.search.take import run
from tests.planner.problems import cluster, mlp, problem, traced


def offers(asked: Problem) -> Iterator[Offer]:
    for count in (8, 1, 4):
        choice = uniform_choice(asked, dp_replicate=1, num_microbatches=count)
        yield Offer(plan=build_plan(asked, choice))


def test_the_best_is_kept() -> None:
    found = run(problem(mlp(), cluster(1)), offers(problem(mlp(), cluster(1))))
    assert found.best and found.best.num_microbatches == 1
    assert (found.candidates, found.exhausted) == (3, True)


def test_ctrl_c_gives_the_best_so_far() -> None:
    asked = problem(mlp(), cluster(1))

    def interrupted() -> Iterator[Offer]:
        yield from itertools.islice(offers(asked), 1)
        raise KeyboardInterrupt

    found = run(asked, interrupted())
    assert found.best and found.best.num_microbatches == 8 and not found.exhausted
    with pytest.raises(KeyboardInterrupt):
        run(asked, (raise_interrupt() for _ in range(1)))


def raise_interrupt() -> Offer:
    raise KeyboardInterrupt


def test_the_time_limit_gives_the_best_so_far() -> None:
    asked = problem(mlp(), cluster(1))
    made = list(offers(asked))
    found = run(asked, itertools.cycle(made), deadline=time.monotonic())
    assert found.best and found.candidates == 1 and not found.exhausted
    asked = problem(mlp(4), cluster(4), constraints=("saved=none",))
    plan = search_problem(asked, "exhaustive", time_limit_s=0.05)
    assert plan.evidence and not plan.evidence.exhausted


def test_an_illegal_offer_is_an_error() -> None:
    asked = problem(mlp(), cluster(1))
    good = build_plan(asked, uniform_choice(asked))
    bad = replace(good, stages=(replace(good.stages[0], batch_shares=(7,)),))
    with pytest.raises(PlanError, match="batch_shares"):
        run(asked, iter([Offer(plan=bad)]))


def test_evidence_and_text() -> None:
    plan = search_problem(problem(mlp(4), cluster(2)), "exhaustive")
    assert plan.evidence and plan.predicted
    assert plan.evidence.alternatives
    for other in plan.evidence.alternatives:
        assert other.step_s >= plan.predicted.step_s
        assert "slower" in other.why or "fit" in other.why or "memory" in other.why
    assert plan.evidence.alternatives[0].name in to_text(plan, width=200)


def test_objective_memory_needs_less() -> None:
    fast = search_problem(problem(mlp(4), cluster(2)))
    small = search_problem(problem(mlp(4), cluster(2), objective="memory"))
    assert fast.predicted and small.predicted
    assert small.predicted.peak_bytes < fast.predicted.peak_bytes
    assert small.predicted.step_s > fast.predicted.step_s


def test_clipping_is_in_the_plan_and_in_its_step() -> None:
    plain, clipped = (
        search(mlp(), cluster(2), precision="fp32", progress=False, max_grad_norm=norm)
        for norm in (None, 1.0)
    )
    assert plain.max_grad_norm is None and clipped.max_grad_norm == 1.0
    assert "gradients clipped to 1" in str(clipped)
    assert plain.predicted and clipped.predicted
    assert clipped.predicted.step_s > plain.predicted.step_s


def vector_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def test_from_a_module() -> None:
    example = (torch.zeros(4, 4), torch.zeros(4, 2))
    plans = [
        search(
            vector_net(), cluster(2), example_inputs=example, loss_fn=squared, precision="fp32",
            progress=False, global_batch_size=batch,
        )
        for batch in (None, 8)
    ]  # fmt: skip
    assert [plan.global_batch_size for plan in plans] == [4, 8]
    assert plans[0].model.num_parameters == 30


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"optimizer": "adamm"}, "no optimizer 'adamm'; nearest is 'adam'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; it must be positive"),
        ({"precision": "fp8"}, "nearest is 'fp64'|nearest is"),
        ({"objective": "speed"}, "objective 'speed'"),
        ({"searcher": "exhaustiv"}, "nearest is 'exhaustive'"),
        ({"time_limit_s": 0}, "time_limit_s is 0"),
        ({"constraints": ("tp2",)}, "write for example tp=2"),
        ({"global_batch_size": 12}, "traced at 8"),
    ],
)
def test_bad_arguments(changes: dict[str, object], says: str) -> None:
    asked: dict[str, object] = {"precision": "fp32", "progress": False, **changes}
    with pytest.raises(PlanError, match=says):
        search(mlp(), cluster(2), **asked)  # type: ignore[arg-type]


def test_options_go_by_their_names() -> None:
    with pytest.raises(TypeError, match=r"third argument is a tuple; nearest is example_inputs="):
        search(mlp(), cluster(2), (torch.zeros(8, 16),))
    with pytest.raises(TypeError, match="no argument 'optimiser'; nearest is 'optimizer'"):
        search(mlp(), cluster(2), optimiser="sgd")
    with pytest.raises(TypeError, match=r"no argument 'tp'; nearest is constraints=\['tp=2'\]"):
        search(mlp(), cluster(2), tp=2)
    with pytest.raises(TypeError, match=r"no argument 'pins'; nearest is constraints="):
        search(mlp(), cluster(2), pins=["tp=2"])


def test_a_module_without_parameters() -> None:
    example = (torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(MeshwrightError, match="parameter"):
        search(nn.ReLU(), cluster(2), example_inputs=example, loss_fn=squared, progress=False)


def test_a_link_without_bandwidth() -> None:
    with pytest.raises(PlanError, match="bandwidth"):
        Link(name="cut", bandwidth_bytes_per_s=0, latency_s=0)


def conflict(*constraints: str, num_devices: int = 2) -> str:
    with pytest.raises(Infeasible) as error:
        search_problem(problem(mlp(), cluster(num_devices), constraints=constraints), "exhaustive")
    return str(error.value)


def test_conflicts_are_minimal_and_come_with_a_way_out() -> None:
    text = conflict("tp=2", "pp=2", "schedule=gpipe", "recompute=none")
    assert text.startswith("no plan meets 'pp=2' and 'tp=2' together")
    assert "gpipe" not in text
    assert "without 'pp=2': pp=1" in text and "without 'tp=2': tp=1" in text
    assert "needs as many devices" not in text  # there are two


def test_a_conflict_is_explained_by_one_search_for_each_set_of_pins() -> None:
    asked = problem(mlp(2), cluster(2), constraints=("tp=2", "pp=2"))
    seen: list[tuple[str, ...]] = []

    def solve(relaxed: Problem) -> SearchLog:
        seen.append(tuple(map(str, relaxed.constraints)))
        return run(relaxed, find_searcher("exhaustive")(relaxed))

    said = str(explain(asked, run(asked, iter(())), solve))
    assert "without 'pp=2': pp=1" in said and "without 'tp=2': tp=1" in said
    assert sorted(seen) == [(), ("pp=2",), ("tp=2",)]


def test_the_nearest_memory_cap_is_one_that_works() -> None:
    text = conflict("memory<=1kB", "tp=1")
    assert "'memory<=1000B'" in text and "tp" not in text.split(";")[0]
    cap = text.split("nearest cap: ")[1].split(" (")[0]
    plan = search_problem(problem(mlp(), cluster(2), constraints=(cap, "tp=1")), "exhaustive")
    assert plan.predicted and f"memory<={plan.predicted.peak_bytes}B" == cap
    assert cap in conflict(f"memory<={plan.predicted.peak_bytes - 1}B", "tp=1")


def test_pins_that_no_plan_has() -> None:
    text = conflict("tp=3")
    assert "tp 3 needs as many devices, and the cluster has 2; without 'tp=3': tp=" in text
    assert "block layers.0 on stage 0" in conflict("block layers.0 on stage 1")
    text = conflict("num_microbatches=3")
    assert "has no 3 equal parts; nearest: 2 and 4" in text and "num_microbatches=" in text
    text = conflict("tp=3", num_devices=4)
    assert "multiple of it, and the cluster has 4; nearest: 2 and 4" in text
    many = problem(mlp(), cluster(16), constraints=("dp_replicate=16",))
    (pin,) = many.constraints
    assert plain_reason(many, pin) == "16 replicas need a sample each, and the global batch is 8"
    (fits,) = problem(mlp(), cluster(16), constraints=("dp_replicate=8",)).constraints
    assert plain_reason(many, fits) == ""  # a sample each
    assert plain_reason(many, replace(pin, relation="<=")) == ""
    assert plain_reason(many, replace(pin, scope=Scope(stage=0))) == ""
    assert "pp=" in conflict("pp=4", num_devices=4)  # three blocks


def test_a_model_that_does_not_fit_at_all() -> None:
    base = cluster(2)
    full = replace(base.device_types[0], reserved_bytes=base.device_types[0].memory_bytes - 9000)
    tiny = replace(base, device_types=(full,))
    for searcher in ("exhaustive", "ilp"):
        with pytest.raises(Infeasible, match=r"does not fit the 2 devices of toy:2.*nearest"):
            search_problem(problem(mlp(), tiny), searcher)


def test_mixed_device_types() -> None:
    base = cluster(3)
    weak = replace(base.device_types[0], name="weak", peak_flops={"float32": 2e8})
    mixed = replace(
        base, device_types=(*base.device_types, weak),
        nodes=(replace(base.nodes[0], devices=("toy", "toy", "weak")),),
    )  # fmt: skip
    asked = ("pp=2", "recompute=none", "schedule=one_f_one_b", "dp_shard=1")
    plans: list[Plan] = [
        search_problem(problem(mlp(4), mixed, constraints=asked), s) for s in ("exhaustive", "ilp")
    ]
    for plan in plans:
        last = next(stage for stage in plan.stages if 2 in stage.devices)
        assert last.devices != (2,) or last.first != "layers.1", "the weak device has little to do"
    assert plans[1].predicted and plans[0].predicted
    assert plans[1].predicted.step_s <= 1.02 * plans[0].predicted.step_s


def test_heads_that_tp_does_not_divide_are_split_unevenly() -> None:
    asked = problem(traced("gpt2"), cluster(3), constraints=("tp=3",))
    plan = search_problem(asked, "ilp")
    assert all(stage.model == (("tp", 3),) for stage in plan.stages)


def test_a_large_instance_is_refused_by_the_oracle_and_not_by_auto() -> None:
    asked = problem(mlp(8), cluster(8))
    with pytest.raises(PlanError, match="use searcher='ilp'"):
        search_problem(asked, "exhaustive")
    plan = search_problem(asked)
    assert plan.evidence and plan.evidence.searcher == "ilp"


def test_batch_norms_keep_one_microbatch() -> None:
    asked = problem(traced("resnet50"), cluster(2))
    assert search_problem(asked, "ilp").num_microbatches == 1


def test_no_clock_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(mlp(), cluster(2))
    text = dumps(search_problem(asked, "exhaustive"))
    for clock in (time, deadline):
        monkeypatch.setattr(clock, "monotonic", lambda: 5.0)
    assert dumps(search_problem(asked, "exhaustive")) == text


def test_preset_clusters_work() -> None:
    for machine in (Cluster.local(2), Cluster.preset("h100-sxm", num_nodes=2, devices_per_node=2)):
        assert search_problem(problem(traced("gpt2"), machine)).predicted
