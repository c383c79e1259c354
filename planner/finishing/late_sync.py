"""Other forms of synchronisation (`Stage.sync`), with settings chosen by what they leave to wait
for, in all stages that they suit."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.costmodel.stage.placement import StageCosts, stage_costs
from meshwright.costmodel.stage.stage_model import SyncPrices
from meshwright.forms.sync import is_searched, offers
from meshwright.forms.sync_findings import of_stage
from meshwright.ir.plan.plan import FormChoice, Plan, Setting, Stage
from meshwright.planner.pins.constraints import Pin, allowed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed
from meshwright.planner.search.offers import tie

FINER = 0.001
"""By which a later value of a setting must be better: earlier ones need less memory, or fewer
messages."""
VAIN = 2
"""So many values in a row that are not better, and no further one is tried."""


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with each form that pins leave and that trains as plain training does.

    Not where too little is waited for, unless a pin asks: no form saves more than that.
    """
    assert plan.predicted
    asked = any(isinstance(c, Pin) and c.name == "sync" for c in problem.constraints)
    waits_s = max(stage.sync_s for stage in plan.predicted.stages)
    if not asked and waits_s <= tie(problem) * plan.predicted.step_s:
        return
    for form in filter(is_searched, allowed(problem.constraints, "sync", problem.forms)):
        stages = _Tuned(problem, plan, form).stages()
        if stages != plan.stages:
            yield changed(problem, plan, stages=stages)


class _Tuned:
    """A plan's stages with a form; equal stages get equal settings."""

    def __init__(self, problem: Problem, plan: Plan, form: str) -> None:
        self.tables, self.plan, self.form = problem.tables, plan, form
        self._found: dict[object, FormChoice] = {}

    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, sync=self._choice(index)) if self._suits(stage) else stage
            for index, stage in enumerate(self.plan.stages)
        )

    def _suits(self, stage: Stage) -> bool:
        asked = replace(stage, sync=FormChoice(form=self.form))
        return stage.dp > 1 and not any(of_stage(asked, self.plan.optimizer))

    def _choice(self, index: int) -> FormChoice:
        stage, costs = self.plan.stages[index], stage_costs(self.tables, self.plan, index)
        key = id(costs.cost), stage.zero, tuple(stage.mesh.items()), costs.lines
        if key not in self._found:
            settings = self._tuned(stage, costs)
            self._found[key] = FormChoice(form=self.form, settings=settings)
        return self._found[key]

    def _tuned(self, stage: Stage, costs: StageCosts) -> dict[str, Setting]:
        """One setting after the other, the rest as they are by then."""
        sizes = costs.cost.params.items()
        trained = [nbytes for name, nbytes in sizes if nbytes and name in self.tables.trained]
        values = offers(self.form, trained) if trained else {}
        settings = {name: tried[0] for name, tried in values.items()}
        prices = SyncPrices(self.tables, stage, costs)
        best_s = prices.waited_s(FormChoice(form=self.form, settings=settings))
        for name, tried in values.items():
            vain = 0
            for value in tried[1:]:
                other = settings | {name: value}
                found_s = prices.waited_s(FormChoice(form=self.form, settings=other))
                vain += 1
                if found_s < best_s * (1 - FINER):
                    best_s, settings, vain = found_s, other, 0
                if vain == VAIN:
                    break
        return settings
