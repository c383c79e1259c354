"""The optimizer's state on the host, and its step there."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from meshwright.costmodel.estimate import estimate_all
from meshwright.forms.host_link import ShapedLink, shaped
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.ir.precision import in_which_traced
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.deep import Deep, batch
from meshwright.testing.equality import check_equal
from meshwright.testing.hosts import apart
from meshwright.testing.models import CASES
from meshwright.testing.spawn import run_ranks
from tests.form_files.small import LR, batches, difference, graph, graph_of, model, tracked
from tests.overlap_plans import planned

HOST = FormChoice(form="update_on_host")
SHAPE = 200e6
"""Bytes per second: copies of the small model take a part of a millisecond."""

SLOW = 1e6
"""A layer's gradients are longer on their way than its backward takes."""


EXACT, NARROW = "copies64", "copies32"
"""Blocks read copies: in float64, so that all is exact, and in half the bytes."""


def problem(
    ranks: int,
    cluster: Cluster | None = None,
    pins: tuple[str, ...] = (),
    precision: str = "fp64",
) -> Problem:
    cluster = cluster or Cluster.local(ranks)
    return make_problem(
        graph(in_which_traced(precision)), cluster, precision=precision, optimizer="adamw",
        constraints=pins,
    )  # fmt: skip


def on_host(made: Problem, store: FormChoice = HOST, **sizes: Any) -> Plan:
    plan = build_plan(made, uniform_choice(made, **sizes), predict=False)
    return replace(plan, stages=tuple(replace(stage, store=store) for stage in plan.stages))


STORES = [None, HOST, FormChoice(form="on_host"), FormChoice(form="shards_on_host")]
ALONE: list[dict[str, Any]] = [{}, {"num_microbatches": 4}]
SHARED: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "zero": 2, "num_microbatches": 2},
    {"tp": 2},
    {"pp": 2, "num_microbatches": 2},
]


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", ALONE)
@pytest.mark.parametrize("rate", [None, SHAPE])
@pytest.mark.parametrize("precision", ["fp64", EXACT])
def test_one_rank_trains_as_one_process(sizes, rate, precision) -> None:
    with shaped(rate):
        assert difference(on_host(problem(1, precision=precision), **sizes)) <= 1e-10


COPIED = [
    *((1, {"num_microbatches": 2}, "on_host", ahead) for ahead in (0, 2)),
    (1, {"recompute": "full"}, "on_host", 1),
    (2, {"dp_replicate": 2}, "on_host", 1),
    (2, {"pp": 2, "num_microbatches": 2}, "on_host", 1),
    (2, {"dp_replicate": 2, "num_microbatches": 2}, "update_on_host", 1),
    (2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}, "update_on_host", 1),
    (2, {"tp": 2}, "update_on_host", 1),
    (1, {"num_microbatches": 4}, "sums_on_host", 1),
    (2, {"tp": 2, "num_microbatches": 2}, "sums_on_host", 1),
    (2, {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}, "sums_on_host", 1),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("ranks, sizes, store, ahead", COPIED, ids=str)
def test_copies_that_the_host_makes_train_as_one_process(ranks, sizes, store, ahead) -> None:
    plan = on_host(problem(ranks, precision=EXACT), FormChoice(form=store), **sizes)
    plan = replace(plan, stages=tuple(replace(s, prefetch=ahead) for s in plan.stages))
    assert not [f for f in plan.verify(graph(EXACT)) if f.severity == "error"]
    with shaped(SHAPE):
        assert difference(plan) <= 1e-10


FETCHED: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (1, {"num_microbatches": 2}), (2, {"dp_replicate": 2}), (2, {"tp": 2}),
    (2, {"pp": 2, "num_microbatches": 2}), (1, {"recompute": "full"}),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("ranks, sizes", FETCHED, ids=str)
def test_parameters_that_come_block_by_block_train_as_one_process(ranks, sizes, ahead) -> None:
    plan = on_host(problem(ranks), FormChoice(form="on_host"), **sizes)
    plan = replace(plan, stages=tuple(replace(s, prefetch=ahead) for s in plan.stages))
    assert not [f for f in plan.verify(graph()) if f.severity == "error"]
    with shaped(SHAPE):
        assert difference(plan) <= 1e-10


@pytest.mark.sampled
@pytest.mark.parametrize("bucket_bytes", [2**12, 2**24])
@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_ranks_train_as_one_process(
    sizes: dict[str, Any], bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients in one bucket, and in several, of which the first leave while others come."""
    for name in ("zero0", "zero1", "zero2"):
        monkeypatch.setattr(f"meshwright.forms.sync.{name}.BUCKET_BYTES", bucket_bytes)
    with shaped(SHAPE):
        assert difference(on_host(problem(2), **sizes)) <= 1e-10


def _clipped(plan: Plan) -> tuple[list[float], dict[str, Tensor], list[float]]:
    job = compile_job(
        model(), plan, lr=LR, device="cpu", graph=graph(), check=True, max_grad_norm=0.5
    )
    losses = [float(job.step(batch)) for batch in batches()]
    state, norm = full_state(job), float(job.grad_norm)
    job.close()
    return losses, state, [norm]


def test_gradients_that_are_limited_are_limited_on_the_host() -> None:
    """The norm is of all gradients, wherever each is; the self-check compares too."""
    made = problem(2)
    usual = build_plan(made, uniform_choice(made, dp_shard=2, zero=1), predict=False)
    some = ParameterChoice(zero=1, store=HOST)
    mixed = replace(usual.stages[0], by_parameter={"layers.1.*": some})
    wanted = run_ranks(2, _clipped, usual)[0]
    for plan in (on_host(made, dp_shard=2, zero=1), replace(usual, stages=(mixed,))):
        found = run_ranks(2, _clipped, plan)[0]
        assert found[0] == pytest.approx(wanted[0], rel=1e-10)
        assert found[2] == pytest.approx(wanted[2], rel=1e-10)
        for name, x in wanted[1].items():
            assert torch.allclose(found[1][name], x, rtol=1e-10, atol=1e-12)


def test_tied_weights_of_two_stages_are_summed_before_they_leave() -> None:
    traced, plan = planned("gpt2", 4, "none", pp=2, tp=1, num_microbatches=2)
    plan = replace(plan, stages=tuple(replace(s, store=HOST) for s in plan.stages))
    assert check_equal(CASES["gpt2"], plan, traced).worst_of_both <= 1e-9


PARTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp_shard": 2, "zero": 3}),
    (3, {"dp_shard": 3, "zero": 3}),
    (2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2, "recompute": "full"}),
    (4, {"dp_shard": 2, "dp_replicate": 2, "zero": 3}),
    (4, {"dp_shard": 2, "tp": 2, "zero": 3}),
    (4, {"dp_shard": 2, "pp": 2, "zero": 3, "num_microbatches": 2}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("precision, ahead", [("fp64", 0), ("fp64", 2), (EXACT, 1)])
@pytest.mark.parametrize("ranks, sizes", PARTS, ids=str)
def test_parts_that_the_host_steps_train_as_one_process(ranks, sizes, precision, ahead) -> None:
    plan = on_host(problem(ranks, precision=precision), FormChoice(form="shards_on_host"), **sizes)
    plan = replace(plan, stages=tuple(replace(s, prefetch=ahead) for s in plan.stages))
    assert not [f for f in plan.verify(graph_of(plan)) if f.severity == "error"]
    with shaped(SHAPE):
        assert difference(plan) <= 1e-10


MEASURED: list[tuple[int, dict[str, Any], str]] = [
    *((1, sizes, "fp64") for sizes in ALONE),
    (2, {"dp_replicate": 2}, "fp64"), (2, {"dp_shard": 2, "zero": 1}, "fp64"),
    (2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}, "fp64"),
    (1, {"num_microbatches": 4}, NARROW),
    (2, {"dp_replicate": 2}, NARROW), (2, {"dp_shard": 2, "zero": 1}, NARROW),
    (2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}, "fp64"),
    (2, {"dp_shard": 2, "zero": 3}, NARROW),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("ranks, sizes, precision", MEASURED, ids=str)
def test_memory_of_the_device_is_what_is_tracked(
    ranks: int, sizes: dict[str, Any], precision: str
) -> None:
    """As much is on its way as may be, since the link is slow: the host saves what is predicted. A
    job without a host of its own holds all in one memory."""
    for cluster, rate in ((apart(ranks, SLOW), SLOW), (Cluster.local(ranks), None)):
        made = problem(ranks, cluster=cluster, precision=precision)
        usual = build_plan(made, uniform_choice(made, **sizes), predict=False)
        parts = sizes.get("zero") == 3
        plans = [usual, on_host(made, STORES[-1] if parts else HOST, **sizes)]
        with shaped(rate):
            counted = run_ranks(ranks, tracked, plans)
        said = [
            estimate_all(made.graph, cluster, plan, made.tables).prediction.stages[0].memory
            for plan in plans
        ]
        most = [max(rank[number] for rank in counted) for number in range(2)]
        saved = said[0].tensor_bytes - said[1].tensor_bytes
        near = 0.05 if parts else 0.01  # what ZeRO 3 gathers is not held to the byte
        assert saved == pytest.approx(most[0] - most[1], rel=near if rate else 0.1)
        assert saved > 0 if rate else saved < 0
        trained = sum(t.nbytes for t in graph().parameters)
        shard = sizes.get("dp_shard", 1)
        # Parameter, gradient, and two of the optimizer; a copy where the host makes those.
        each = 4.5 if precision == NARROW and (shard == 1 or parts) else 4
        assert said[1].host_bytes == each * trained / shard


class _AtLast:
    """A copy on a link so slow that it is over when somebody waits for it, or for a later one."""

    waiting: ClassVar[dict[str, list["_AtLast"]]] = {"host": [], "device": []}

    def __init__(self, way: str, source: Tensor, target: Tensor) -> None:
        self._line, self._tensors = self.waiting[way], [source.detach(), target.detach()]
        self._line.append(self)

    @torch.no_grad()
    def wait(self) -> None:
        while self in self._line:
            first = self._line.pop(0)
            source, target = first._tensors
            target.copy_(source)
            first._tensors.clear()  # whoever waits may keep this


def _deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(10)]
    return nn.Sequential(*layers).double()


def test_the_host_has_gradients_their_sums_and_copies() -> None:
    """Of each parameter 8 bytes and a copy of 4, 16 of the optimizer, a sum of 8; and three blocks'
    gradients of 4."""
    cluster, sizes = apart(1, SLOW), {"num_microbatches": 2}
    made = problem(1, cluster=cluster, precision=NARROW)
    plan = on_host(made, FormChoice(form="sums_on_host"), **sizes)
    memory = estimate_all(made.graph, cluster, plan, made.tables).prediction.stages[0].memory
    count = sum(t.numel for t in made.graph.parameters)
    layer = sum(t.numel for t in made.graph.parameters if t.fqn.startswith("layers.0."))
    assert memory.host_bytes == 36 * count + 3 * 4 * layer


def _most_on_a_slow_link(plan: Plan, traced: Graph, at_last: bool) -> int:
    if plan.precision == "fp64":
        net, given, loss_fn = _deep(), _FEW, nn.functional.mse_loss
    else:
        net, given, loss_fn = Deep(), batch(), None
    with pytest.MonkeyPatch.context() as patch:
        if at_last:
            patch.setattr(ShapedLink, "_copy", lambda _, *said: _AtLast(*said))
        job = compile_job(
            net, plan, loss_fn=loss_fn, example_inputs=given, device="cpu", check=False,
            graph=traced,
        )  # fmt: skip
        job.step(given)
        job.track_memory(given)
        job.close()
    assert job.tensor_memory is not None
    return job.tensor_memory.peak_bytes


_FEW = (torch.ones(2, 48, dtype=torch.float64), torch.zeros(2, 48, dtype=torch.float64))


@pytest.mark.parametrize(
    "store, microbatches", [("update_on_host", 1), ("sums_on_host", 2), ("on_host", 2)]
)
def test_no_more_than_three_blocks_of_a_deep_model_have_gradients(store, microbatches) -> None:
    """One that runs, and two whose gradients are on their way; none of them where parameters come
    from the host meanwhile."""
    traced, cluster = trace(_deep(), _FEW, nn.functional.mse_loss), apart(1, SLOW)
    made = make_problem(traced, cluster, precision="fp64", optimizer="adamw")
    plan = on_host(made, FormChoice(form=store), num_microbatches=microbatches)
    with shaped(SLOW):
        # Where parameters come as gradients go, each takes its time.
        (counted,) = run_ranks(1, _most_on_a_slow_link, plan, traced, store != "on_host")
    memory = estimate_all(traced, cluster, plan, made.tables).prediction.stages[0].memory
    trained = sum(t.nbytes for t in traced.parameters)
    assert memory.tensor_bytes == pytest.approx(counted, rel=0.03)
    assert counted < (0.25 if store == "on_host" else 1.4) * trained


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16", "bf16, layers.1=fp32"])
def test_gradients_are_on_their_way_when_the_next_micro_batch_begins(precision) -> None:
    """Where most is saved then, casts of all weights, that is the most there is."""
    traced, cluster = trace(Deep(), batch(), precision=precision), apart(1, SLOW)
    made = make_problem(traced, cluster, precision=precision, optimizer="adamw")
    plan = on_host(made, FormChoice(form="sums_on_host"), num_microbatches=2)
    with shaped(SLOW):
        (counted,) = run_ranks(1, _most_on_a_slow_link, plan, traced, True)
    memory = estimate_all(traced, cluster, plan, made.tables).prediction.stages[0].memory
    assert memory.tensor_bytes == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("ahead, precision", [(0, "fp64"), (1, "fp64"), (1, NARROW)])
def test_memory_of_parameters_that_come_block_by_block(ahead: int, precision: str) -> None:
    """The device has those of a block, and of one ahead; of so few blocks never all at once."""
    cluster = apart(1, SLOW)
    made = problem(1, cluster=cluster, precision=precision)
    usual = build_plan(made, uniform_choice(made, num_microbatches=2), predict=False)
    plan = on_host(made, FormChoice(form="on_host"), num_microbatches=2)
    plan = replace(plan, stages=(replace(plan.stages[0], prefetch=ahead),))
    with shaped(SLOW):
        (counted,) = run_ranks(1, tracked, [usual, plan])
    said = [
        estimate_all(made.graph, cluster, each, made.tables).prediction.stages[0].memory
        for each in (usual, plan)
    ]
    assert said[1].parameters_bytes == 0
    assert said[0].tensor_bytes == pytest.approx(counted[0], rel=0.01)
    assert counted[1] < counted[0] / 2.8
    # Gradients have gone when parameters that come at once are there; else it is the most there is.
    if ahead:
        most = said[1].tensor_bytes + said[1].late_copies_bytes
        assert counted[1] <= most < 1.6 * counted[1]
    else:
        assert said[1].tensor_bytes == pytest.approx(counted[1], rel=0.01)


def _resumed(first: Plan, then: Plan, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps as one plan says, the rest as another."""
    losses: list[float] = []
    for again, plan, own in ((False, first, batches()[:3]), (True, then, batches()[3:])):
        job = compile_job(
            model(), plan, optimizer=plan.optimizer, lr=LR, device="cpu", graph=graph(),
            check=False,
        )  # fmt: skip
        if again:
            job.load(folder)
        losses += [float(job.step(batch)) for batch in own]
        if not again:
            job.save(folder)
        state = full_state(job)
        job.close()
    return losses, state


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("then", range(3))
def test_checkpoints_know_nothing_of_where_state_lives(first: int, then: int, tmp_path) -> None:
    if first == then:
        return
    made = problem(1)
    usual = build_plan(made, uniform_choice(made), predict=False)
    before, after = (
        replace(usual, stages=(replace(usual.stages[0], store=STORES[n]),)) for n in (first, then)
    )
    with shaped(SHAPE):
        ((losses, state),) = run_ranks(1, _resumed, before, after, str(tmp_path))
        ((wanted_losses, wanted),) = run_ranks(1, _resumed, usual, usual, str(tmp_path / "usual"))
    assert losses == pytest.approx(wanted_losses, rel=1e-10)
    for name, x in wanted.items():
        assert torch.allclose(state[name], x, rtol=1e-10, atol=1e-12), name


def test_a_search_keeps_things_on_the_host_where_memory_is_short() -> None:
    """Against making again and moving activations; a plan file of it is priced as it was."""
    found = {}
    for cap in (150, 90, 60):
        made = problem(1, cluster=apart(1, 1e9), pins=(f"memory<={cap}kB",))
        plan = search_problem(made)
        assert plan.predicted and plan.predicted.peak_bytes <= cap * 1000
        found[cap] = plan
    said = {cap: str(plan.stages[0].store) for cap, plan in found.items()}
    assert said == {150: "None", 90: "update_on_host", 60: "on_host"}
    assert found[150].predicted.step_s < found[90].predicted.step_s < found[60].predicted.step_s
    assert loads(dumps(found[60])) == found[60]
    # Two ranks with less in flight would do, and take longer.
    plan = search_problem(problem(2, cluster=apart(2, 1e9), pins=("memory<=110kB",)))
    assert str(plan.stages[0].store) == "update_on_host"
    with pytest.raises(Infeasible):
        pins = ("memory<=90kB", "store=zero")
        search_problem(problem(1, cluster=apart(1, 1e9), pins=pins))


def test_a_search_keeps_what_is_stepped_on_the_host_and_copies_on_the_device() -> None:
    """It needs less of the device than where blocks read what is stepped."""
    asked = {"cluster": apart(1, 1e9), "pins": ("memory<=80kB",)}
    narrow = search_problem(problem(1, precision=NARROW, **asked))
    assert str(narrow.stages[0].store) in ("update_on_host", "sums_on_host") and narrow.predicted
    wide = search_problem(problem(1, **asked))
    assert wide.stages[0].store and wide.predicted
    assert narrow.predicted.peak_bytes < wide.predicted.peak_bytes
    assert narrow.predicted.stages[0].memory.host_bytes > wide.predicted.stages[0].memory.host_bytes


def test_the_hosts_memory_is_a_limit_too() -> None:
    """A search finds nothing where it would do with more, and a check says why."""
    pins = ("memory<=90kB", "num_microbatches=1")
    plan = search_problem(problem(1, cluster=apart(1, 1e9), pins=pins))
    assert plan.predicted and plan.stages[0].store
    trained = sum(t.nbytes for t in graph().parameters)
    assert plan.predicted.stages[0].memory.host_bytes == 4 * trained
    little = apart(1, 1e9, host_bytes=2**20)
    bigger = replace(plan.predicted.stages[0].memory, host_bytes=2**20 + 1)
    stage = replace(plan.predicted.stages[0], memory=bigger)
    told = replace(plan, predicted=replace(plan.predicted, stages=(stage,)))
    said = [f.message for f in told.verify(graph(), little) if f.rule == "memory"]
    assert len(said) == 1 and "of the host" in said[0]
    assert excess_bytes(problem(1, cluster=little), told) == 1


@pytest.mark.parametrize(
    "sizes, choice, says, near",
    [
        ({"dp_shard": 2, "zero": 3}, HOST, "every rank has whole", "store shards"),
        ({"dp_shard": 2, "zero": 1}, FormChoice(form="on_host"), "ranks step them whole", ""),
        ({"dp_replicate": 2}, FormChoice(form="on_host", settings={"x": 1}), "no setting 'x'",
         "on_host alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(sizes, choice, says, near) -> None:
    plan = on_host(problem(2), choice, **sizes)
    said = [f for f in findings(plan) if f.severity == "error"]
    assert any(says in f.message and near in f.nearest for f in said), said
