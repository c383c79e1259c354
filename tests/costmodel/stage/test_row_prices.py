"""What looking rows up costs beside bytes: messages that tables share, ops of the host, steps of
rows that have a gradient."""

from dataclasses import replace

import pytest

from meshwright.forms.sync import exchange_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from tests.form_files.owners import plan_of
from tests.form_files.words import batch, model


def predicted(plan: Plan, latency_s: float = 0.0, overhead_s: float = 1e-5) -> Prediction:
    """On processes of this machine, with such a latency of messages and dispatch of ops."""
    machine = Cluster.local(2)
    (node,) = machine.nodes
    link = replace(node.link, latency_s=latency_s, launch_s=latency_s, step_s=latency_s, curves=())
    kind = replace(machine.device_types[0], overhead_s=overhead_s)
    cluster = replace(machine, nodes=(replace(node, link=link),), device_types=(kind,))
    problem = make_problem(
        trace(model(), batch(0)), cluster, precision="fp64", optimizer=plan.optimizer
    )
    return predict_plan(problem, plan)


def of(plan: Plan, *paths: str, **facts: float) -> Plan:
    """The plan with these tables only, of which so much is stated."""
    stage = plan.stages[0]
    said = {}
    for path in paths:
        choice = stage.by_parameter[path]
        assert choice.sync
        told = {**choice.sync.settings, **facts}
        said[path] = replace(choice, sync=replace(choice.sync, settings=told))
    return replace(plan, stages=(replace(stage, by_parameter=said),))


@pytest.mark.parametrize("form", ["owned_rows", "owned_columns"])
def test_tables_of_a_form_share_messages(form: str) -> None:
    """A second table sends bytes, and not a message more."""
    plan = plan_of(2, "sgd", form=form)
    waits = [
        predicted(of(plan, *paths), 1.0).step_s - predicted(of(plan, *paths), 0.0).step_s
        for paths in (("words.weight",), ("words.weight", "marks.weight"))
    ]
    assert waits[0] > 3 and abs(waits[1] - waits[0]) < 0.1


def test_ops_of_a_table_have_a_price() -> None:
    """By the time in which this device's host begins one."""
    plan = plan_of(2, "sgd")
    slow, fast = (predicted(of(plan, "words.weight"), 0.0, each) for each in (2e-4, 1e-4))
    whole = replace(plan, stages=(replace(plan.stages[0], by_parameter={}),))
    without = predicted(whole, 0.0, 2e-4).step_s - predicted(whole, 0.0, 1e-4).step_s
    assert slow.step_s - fast.step_s - without > 50 * 1e-4


def test_what_is_stepped_is_what_has_a_gradient() -> None:
    """Under an optimizer by which the rest stays as it is, and one owner of each row."""
    for optimizer, rests in (("adagrad", True), ("adamw", False)):
        plan = of(plan_of(2, optimizer), "words.weight", rows=0.01)
        stage = plan.stages[0]
        exchange = exchange_of(as_for(stage, stage.by_parameter["words.weight"]), rests=rests)
        assert exchange.stepped_share == (0.01 if rests else 1.0)
        assert exchange.left[1] == pytest.approx(0.02 if rests else 1.0)
        every = predicted(of(plan_of(2, optimizer), "words.weight", rows=1.0), 0.0, 0.0)
        few = predicted(plan, 0.0, 0.0)
        less = every.stages[0].optimizer_s - few.stages[0].optimizer_s
        assert (less > 0.2 * every.stages[0].optimizer_s) == rests
