"""Forms that change what is computed: a search tries them only where it is allowed, takes them
where they pay, and says what is given up. The words that allow them are the forms' own."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cli.search import Allow
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s
from meshwright.costmodel.ops.overheads import overheads_of
from meshwright.forms.sync import changes, chosen, for_tables, ladder
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

ROOT = Path(__file__).parent.parent.parent


class Words(nn.Module):
    """A large table, and matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50_000, 32)
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.layers(self.words(ids).mean(1)).square().mean()
        return found


@cache
def words() -> Graph:
    return trace(Words(), (torch.zeros(512, 8, dtype=torch.int64),))


def cluster(wire: float) -> Cluster:
    """Nodes of one device, and a wire of so many bytes per second between them."""
    found = Cluster.preset("v100-16", num_nodes=4, devices_per_node=1)
    assert found.between_nodes
    between = replace(found.between_nodes, bandwidth_bytes_per_s=wire, curves=())
    return replace(found, between_nodes=between)


def found(wire: float, **more: Any) -> Plan:
    pins = ("pp=1", "model=1", "dp=4")
    return mw.search(words(), cluster(wire), constraints=pins, progress=False, **more)


def forms(plan: Plan) -> set[str]:
    (stage,) = plan.stages
    said = [stage.sync, *(choice.sync for choice in stage.by_parameter.values())]
    return {choice.form for choice in said if choice}


def first_lines(plan: Plan) -> str:
    return "\n".join(str(plan).splitlines()[:6])


def test_thin_matrices_where_they_pay_and_are_allowed() -> None:
    plain, thin = found(1e8), found(1e8, allow=("low_rank",))
    assert plain.predicted and thin.predicted and thin.evidence
    assert "powersgd" not in forms(plain) and not plain.gives_up
    assert forms(thin) == {"powersgd"} and thin.stages[0].zero == 0
    assert thin.predicted.step_s < 0.5 * plain.predicted.step_s
    assert "products of thin ones" in first_lines(thin) and thin.evidence.gap is None
    # Where the wire is as fast as memory, products take longer than they save.
    assert "powersgd" not in forms(found(1e12, allow=("low_rank",)))
    assert "powersgd" not in forms(found(1e8, allow=("sketch", "delayed")))


def test_the_rank_is_the_least_change_that_gains() -> None:
    """Ranks are tried from the highest on, and on a slower wire lower ones pay."""
    ranks = []
    for wire in (1e9, 1e6):
        sync = found(wire, allow=("low_rank",)).stages[0].sync
        assert sync and sync.form == "powersgd"
        ranks.append(sync.settings["rank"])
    assert ranks[1] <= ranks[0] and ranks[1] < max(s["rank"] for s in ladder("powersgd"))


def test_sketches_of_tables_where_they_pay_and_are_allowed() -> None:
    rows = "zipf:1.05"
    plain, sketched = found(1e7, rows=rows), found(1e7, rows=rows, allow=("sketch",))
    assert plain.predicted and sketched.predicted
    assert forms(plain) <= set(for_tables()) and not plain.gives_up
    assert "sketch" in forms(sketched)
    assert sketched.predicted.step_s < plain.predicted.step_s
    assert "estimated from sketches" in first_lines(sketched)
    own = sketched.stages[0].by_parameter["words.weight"].sync
    assert own and 0 < float(own.settings["rows"]) < 0.2 and own.settings["cells"] in (0.125, 0.25)
    assert "sketch" not in forms(found(1e7, allow=("sketch",))), "nothing is known of its rows"
    assert "sketch" not in forms(found(1e12, rows=rows, allow=("sketch",)))


def test_words_are_those_that_forms_declare() -> None:
    known = {changes(form) for form in chosen()} - {""}
    assert {"sketch", "low_rank", "delayed"} <= known
    with pytest.raises(PlanError, match="nearest is 'low_rank'"):
        found(1e8, allow=("low_rang",))
    (option,) = Allow.__metadata__  # type: ignore[attr-defined]
    assert all(word in option.help for word in known), "the command line says which there are"
    for folder in ("planner", "costmodel", "runtime", "ir"):
        texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        assert not any(f'"{word}"' in text for text in texts for word in known)


def predicted_s(form: str, wire: float = 1e15, **settings: Any) -> float:
    """Of a step whose table has a form, where what it sends takes no time."""
    problem = make_problem(words(), cluster(wire), precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=4), predict=False)
    own = ParameterChoice(sync=FormChoice(form=form, settings=settings))
    stage = replace(plan.stages[0], by_parameter={"words.weight": own})
    plan = replace(plan, stages=(stage,))
    return estimate_all(words(), problem.cluster, plan, problem.tables).prediction.step_s


def test_what_they_compute_has_a_price() -> None:
    """What is lost by what is read and written for it, hashes by the rows that occur, products by
    arithmetic where that takes longer than memory does."""
    (device,) = cluster(1e9).device_types
    table = 50_000 * 32 * 4
    kept, left = (predicted_s("powersgd", rank=1, feedback=word) for word in ("yes", "no"))
    # Other gradients are on their way meanwhile, and slow it down.
    assert kept - left == pytest.approx(overheads_of(device).copy_s(7 * table), rel=0.05)
    rows = [predicted_s(form, rows=0.5) for form in ("packed_rows", "sketch")]
    hashed_s = overheads_of(device).copy_s(60 * 0.5 * table)
    assert rows[1] - rows[0] == pytest.approx(hashed_s, rel=0.01)
    assert predicted_s("sketch", rows=1.0) - rows[0] == pytest.approx(2 * hashed_s, rel=0.01)
    for kind in (device, Cluster.local(2).device_types[0]):
        of = overheads_of(kind)
        assert of.work_s(1e6, 0.0, 0) == of.copy_s(1e6) < of.work_s(1e6, 1e12, 0)
        assert of.work_s(0, 2e12, 0) == pytest.approx(2 * of.work_s(0, 1e12, 0))
        assert of.work_s(1e6, 0.0, 9) > of.work_s(1e6, 0.0, 0)
    # Thick products take what their class takes on such operands, which are packed.
    edge, curve = 512, replace(curve_of(OpClass.MATMUL, kind), packing=0.5)
    kind = replace(kind, curves={**kind.curves, OpClass.MATMUL: curve})
    of = overheads_of(kind)
    work = KernelWork(OpClass.MATMUL, "float32", 2.0 * edge**3, 12.0 * edge**2)
    thick_s = of.work_s(work.nbytes, work.flops, 0, thin=False)
    packing_s = 0.5 * of.copy_s(work.nbytes)
    assert thick_s == pytest.approx(kernel_s(work, kind) + packing_s)
