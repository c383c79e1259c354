"""Who does the work on whole matrices that the user's form of synchronisation needs, and what of it
is sent: how replicas are split among shards and copies of these, and settings of the form."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from meshwright.costmodel.comm.comm import collective_time
from meshwright.costmodel.ops.overheads import overheads_of
from meshwright.forms.stepping import update_findings
from meshwright.forms.sync import suits, work_tries
from meshwright.forms.sync_findings import of_stage
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import FormChoice, Plan, Setting, Stage, Zero
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed

_LEVELS: tuple[Zero, ...] = (0, 1, 2)
_BYTES, _FLOPS = 2**22, 1e9
"""Of a message and a product of matrices that are priced."""


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with each split of replicas, each level and each setting that such a form offers."""
    form = next((form for stage in plan.stages for form in _forms(stage)), "")
    if not form:
        return
    meshes = [_meshes(stage) for stage in plan.stages]
    for number, zero in product(range(max(map(len, meshes))), _LEVELS):
        if not suits(form, zero):
            continue
        stages = [
            _split(stage, own[min(number, len(own) - 1)], zero)
            for stage, own in zip(plan.stages, meshes, strict=True)
        ]
        tries = work_tries(form, *_prices(problem, stages[0]))
        several = any(stage.mesh["dp_replicate"] > 1 for stage in stages if stage.dp > 1)
        for settings in tries if several else tries[:1]:
            tried = tuple(_with(stage, settings) for stage in stages)
            made = replace(plan, stages=tried, predicted=None)
            if tried == plan.stages or broken(problem.constraints, made, problem.graph):
                continue
            if any(update_findings(made, problem.graph)) or not all(
                _is_legal(stage, plan.optimizer) for stage in tried
            ):
                continue
            yield changed(problem, plan, stages=tried)


def _forms(stage: Stage) -> Iterator[str]:
    """Those of a stage that offer who does what."""
    chosen = (stage.sync, *(choice.sync for choice in stage.by_parameter.values()))
    for sync in chosen if stage.dp > 1 else ():
        if sync and work_tries(sync.form, 0.0, 0.0):
            yield sync.form


def _meshes(stage: Stage) -> list[dict[str, int]]:
    """All ways to split its replicas among shards and copies of these."""
    splits = [n for n in range(1, stage.dp + 1) if stage.dp % n == 0]
    return [{**stage.mesh, "dp_shard": n, "dp_replicate": stage.dp // n} for n in splits]


def _split(stage: Stage, mesh: Mapping[str, int], zero: Zero) -> Stage:
    """A stage that is split so, with what is sharded of parameters that have such a form."""
    if stage.dp == 1:
        return stage
    apart = {
        pattern: replace(choice, zero=zero)
        if choice.sync and work_tries(choice.sync.form, 0.0, 0.0)
        else choice
        for pattern, choice in stage.by_parameter.items()
    }
    whole = zero if stage.sync and work_tries(stage.sync.form, 0.0, 0.0) else stage.zero
    return replace(stage, mesh=dict(mesh), zero=whole, by_parameter=apart)


def _with(stage: Stage, settings: Mapping[str, Setting]) -> Stage:
    """The same with some settings of such a form; others stay."""

    def told(sync: FormChoice | None) -> FormChoice | None:
        if sync is None or not work_tries(sync.form, 0.0, 0.0):
            return sync
        return replace(sync, settings={**sync.settings, **settings})

    apart = {
        pattern: replace(choice, sync=told(choice.sync))
        for pattern, choice in stage.by_parameter.items()
    }
    return replace(stage, sync=told(stage.sync), by_parameter=apart)


def _is_legal(stage: Stage, optimizer: str) -> bool:
    views = (stage, *(as_for(stage, choice) for choice in stage.by_parameter.values()))
    return not any(f.severity == "error" for view in views for f in of_stage(view, optimizer))


def _prices(problem: Problem, stage: Stage) -> tuple[float, float]:
    """What a message and a value of it take among copies of a stage's shards, as numbers of
    multiplications that a device does meanwhile."""
    size, shard = stage.model_size, stage.mesh.get("dp_shard", 1)
    levels = problem.tables.levels(stage.devices[:: size * shard])
    device = problem.cluster.device(stage.devices[0])
    one = 2.0 * overheads_of(device).work_s(0.0, _FLOPS, 0.0, thin=False) / _FLOPS
    start = collective_time(Primitive.ALL_GATHER, 1.0, levels)
    whole = collective_time(Primitive.ALL_GATHER, float(_BYTES), levels)
    values = _BYTES / 4
    return start / one, max(0.0, whole - start) / values / one
