"""Which plans are run: by group, a name for each and how it is made."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from meshwright.forms.retention import RETENTIONS, fate_of
from meshwright.forms.storage import for_stages
from meshwright.forms.sync import chosen
from meshwright.forms.updates import UPDATES
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.ir.plan.plan import OVERLAPS, BlockLayout, FormChoice, Plan, model_mesh
from meshwright.ir.precision import PRECISIONS
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.schedule_tools import SCHEDULES
from meshwright.testing.equal_plans import LATE, PLANS, Case, equal_plan
from meshwright.testing.models import CASES
from meshwright.testing.split_all import split_all
from meshwright.tools.check import Checked, check_plan

LISTED = "list"
"""The group of the plans that are to equal one process."""
USUAL = "adamw"
NORM = 1.0
"""Gradients are clipped to it, where a form allows that."""


@dataclass(frozen=True)
class Setting:
    """What a model is traced with."""

    model: str = "gpt2"
    precision: str = "fp32"
    kernels: bool = False
    """All of ours, or the model's own operators."""
    optimizer: str = USUAL

    def __str__(self) -> str:
        kernels = "all kernels" if self.kernels else "own operators"
        optimizer = "" if self.optimizer == USUAL else f", {self.optimizer}"
        return f"{self.model}, {self.precision}, {kernels}{optimizer}"


OWN, ALL = Setting(), Setting("llama", "bf16", kernels=True)
BOTH = OWN, ALL


@dataclass(frozen=True, eq=False)
class Entry:
    """A plan that is run."""

    group: str
    setting: Setting
    kind: str
    case: Case
    saved: str = ""
    """Form of retention of all that ops make."""
    clipped: bool = field(default=True)

    @property
    def name(self) -> str:
        return f"{self.group}: {self.setting}: {self.kind}"

    def made(self) -> tuple[Plan, Graph]:
        """The plan, of H100, with its graph; PlanError if a rule forbids it,
        with the first of what is wrong."""
        setting, kind = self.setting, self.case
        traced = setting.model, setting.precision, setting.kernels, kind.batch
        graph = _traced(*traced)
        cluster = Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=kind.world)
        problem = make_problem(
            graph, cluster, precision=setting.precision, optimizer=setting.optimizer
        )
        plan = equal_plan(problem, kind, partial(_split, *traced))
        if self.saved:
            saved = {b.pattern: {"*": fate_of(self.saved)} for b in graph.blocks}
            plan = replace(plan, stages=tuple(replace(s, saved=saved) for s in plan.stages))
        if self.clipped:
            plan = replace(plan, max_grad_norm=NORM)
        wrong = [x for x in check_plan(Checked(plan, ()), graph).findings if x.severity == "error"]
        if wrong:
            more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise PlanError(f"{wrong[0]}{more}")
        return plan, graph


@cache
def _traced(model: str, precision: str, kernels: bool, batch: int) -> Graph:
    case = CASES[model]
    return trace(
        case.model(torch.float32), case.example(batch, dtype=torch.float32), case.loss_fn,
        kernels=KERNELS if kernels else (), precision=precision,
    )  # fmt: skip


@cache
def _split(
    model: str, precision: str, kernels: bool, batch: int, tp: int
) -> tuple[BlockLayout, ...]:  # fmt: skip
    return split_all(_traced(model, precision, kernels, batch), tp)


SHARED: Mapping[str, Case] = {
    "replicas": Case(2, {"dp_replicate": 2, "num_microbatches": 2}),
    "shards_1": Case(2, {"dp_shard": 2, "zero": 1, "num_microbatches": 2}),
    "shards_2": Case(2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    "shards_3": Case(2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
}
"""Replicas, by what they share out."""
SPLIT = Case(4, {"tp": 2, "pp": 2, "num_microbatches": 4})
VARIED: Mapping[str, Case] = {
    "one": Case(1, {"num_microbatches": 4}), "shards_2": SHARED["shards_2"], "tp2_pp2": SPLIT,
}  # fmt: skip
"""One of each kind of axes."""
MESHES: Mapping[str, tuple[str, Case]] = {
    name: (model, Case(world, {"num_microbatches": 2, **choice, "model": model_mesh(mesh)}))
    for name, model, world, mesh, choice in [
        ("cp2", "", 2, {"cp": 2}, {}),
        ("cp4", "", 4, {"cp": 4}, {}),
        ("cp2_zero3", "", 4, {"cp": 2}, {"dp_shard": 2, "zero": 3}),
        ("cp2_tp2", "", 4, {"cp": 2, "tp": 2}, {}),
        ("cp2_pp2", "", 4, {"cp": 2}, {"pp": 2}),
        ("tp_row2_col2", "", 4, {"tp_row": 2, "tp_col": 2}, {}),
        ("experts_of_all", "mixtral", 1, {}, {}),
        ("ep2", "mixtral", 2, {"ep": 2}, {}),
        ("ep2_zero2", "mixtral", 4, {"ep": 2}, {"dp_shard": 2, "zero": 2}),
        ("ep2_tp2", "mixtral", 4, {"ep": 2, "tp": 2}, {}),
    ]
}  # fmt: skip


def _with(kinds: Mapping[str, Case], **stage: Any) -> Iterator[tuple[str, Case]]:
    for name, kind in kinds.items():
        yield name, replace(kind, stage=stage)


def _listed() -> Iterator[Entry]:
    for model in ("gpt2", "llama"):
        for precision, kernels in (("fp32", False), ("bf16", True)):
            for name, kind in (PLANS | LATE).items():
                yield Entry(LISTED, Setting(model, precision, kernels), name, kind)


def _sync() -> Iterator[Entry]:
    for setting in BOTH:
        for form in chosen():
            for name, kind in _with(SHARED, sync=FormChoice(form=form)):
                yield Entry("sync", setting, f"{form}, {name}", kind, clipped=False)


def _stores() -> Iterator[Entry]:
    for setting in BOTH:
        for form in for_stages():
            for name, kind in _with(VARIED, store=FormChoice(form=form)):
                yield Entry("store", setting, f"{form}, {name}", kind)


def _kept() -> Iterator[Entry]:
    for setting in BOTH:
        for form in RETENTIONS:
            for name, kind in VARIED.items():
                yield Entry("retention", setting, f"{form}, {name}", kind, saved=form)


def _updates() -> Iterator[Entry]:
    for setting in BOTH:
        for update in UPDATES:
            for name in ("shards_2", "tp2_pp2"):
                other = replace(setting, optimizer=update)
                yield Entry("optimizer", other, name, VARIED[name])


def _precisions() -> Iterator[Entry]:
    for setting in BOTH:
        for precision in PRECISIONS:
            for name in ("shards_2", "tp2_pp2"):
                other = replace(setting, precision=precision)
                yield Entry("precision", other, name, VARIED[name])


def _schedules() -> Iterator[Entry]:
    for setting in BOTH:
        for schedule in SCHEDULES:
            choice = {"pp": 2, "num_microbatches": 4, "schedule": schedule}
            yield Entry("schedule", setting, schedule, Case(2, choice))
            more = {"dp_shard": 2, "zero": 3, "recompute": "full"}
            yield Entry("schedule", setting, f"{schedule}, shards, recompute",
                        Case(4, choice | more))  # fmt: skip


def _overlaps() -> Iterator[Entry]:
    for setting in BOTH:
        for overlap in OVERLAPS:
            for again in ("none", "full"):
                choice = SPLIT.choice | {"recompute": again}
                kind = replace(SPLIT, choice=choice, stage={"overlap": overlap})
                yield Entry("overlap", setting, f"{overlap}, recompute {again}", kind)


def _meshes() -> Iterator[Entry]:
    for setting in BOTH:
        for name, (model, kind) in MESHES.items():
            yield Entry("mesh", replace(setting, model=model or setting.model), name, kind)


GROUPS: Mapping[str, Callable[[], Iterator[Entry]]] = {
    LISTED: _listed, "sync": _sync, "store": _stores, "retention": _kept, "optimizer": _updates,
    "precision": _precisions, "schedule": _schedules, "overlap": _overlaps, "mesh": _meshes,
}  # fmt: skip


def entries() -> tuple[Entry, ...]:
    """All plans, those first that are to equal one process."""
    return tuple(entry for group in GROUPS.values() for entry in group())
