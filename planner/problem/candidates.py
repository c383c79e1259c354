"""A choice of the big decisions, and the plan that it stands for."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod

from meshwright.costmodel.cost_cache import Mode
from meshwright.forms.exchange import Exchange
from meshwright.forms.folding import folded_views
from meshwright.forms.retention import AGAIN
from meshwright.forms.sync import exchange, exchange_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.deadline import check_time
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.layout.layout import balanced
from meshwright.ir.memo import Memo
from meshwright.ir.plan.folded import Fold, may_share
from meshwright.ir.plan.keeping import Keeping
from meshwright.ir.plan.plan import (
    ClusterId,
    InputSpec,
    ModelId,
    ModelMesh,
    Plan,
    ProfileId,
    ScheduleTable,
    Stage,
    model_mesh,
    sync_name,
)
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.decisions.zero import splits
from meshwright.planner.pins.constraints import ParametersAs, pinned
from meshwright.planner.pins.decisions import Value
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.problem.by_stage import recomputable as recomputable
from meshwright.planner.problem.predict import settled
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import pinned_policy, policy_of
from meshwright.planner.problem.schedule_tools import USUAL, make_schedule, stages_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Blocks `start` to `stop` (excluded) on `devices`: dp_replicate x dp_shard x model axes."""

    start: int
    stop: int
    devices: tuple[int, ...]
    dp_replicate: int = 1
    dp_shard: int = 1
    model: ModelMesh = ()
    variant: str = ""
    """Which of the layouts on the model mesh."""
    zero: int = 0
    recompute: tuple[str, ...] = ()
    """Patterns or names of the blocks that are recomputed."""
    saved: tuple[tuple[str, str], ...] = ()
    """Patterns or names of other blocks, and how they keep values
    (`planner.problem.saved_modes`)."""
    prefetch: int = 0
    """With zero 3: blocks whose parameters are gathered ahead."""
    shares: tuple[int, ...] = ()
    """Samples per micro-batch of each replica; as even as can be if empty."""

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    def folded(self, fold: Fold) -> "StageChoice":
        """The choice as it is for parameters for which axes are one with dp_shard; devices are in
        no order."""
        times = prod(size for axis, size in self.model if axis in fold)
        left = tuple((axis, size) for axis, size in self.model if axis not in fold)
        return replace(self, dp_shard=self.dp_shard * times, model=left) if fold else self

    @property
    def exchange(self) -> Exchange:
        """What its replicas do to agree."""
        return exchange(sync_name(self.zero, self.dp_shard), self.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Everything that a searcher decides; the rest of the plan follows."""

    stages: tuple[StageChoice, ...]
    num_microbatches: int
    schedule: str
    num_ranks: int
    """Pipeline ranks; stages of one rank are on the same devices."""

    def table(self) -> Schedule:
        return make_schedule(self.schedule, len(self.stages), self.num_microbatches, self.num_ranks)


def cluster_id(cluster: Cluster) -> ClusterId:
    """Returns what a plan says of the cluster that it is for."""
    kinds = {device.kind for device in cluster.device_types}
    return ClusterId(
        name=cluster.name,
        fingerprint=cluster.fingerprint,
        num_devices=cluster.num_devices,
        device_kind=kinds.pop() if len(kinds) == 1 else None,
    )


def build_plan(problem: Problem, choice: Choice, *, predict: bool = True) -> Plan:
    """The whole plan of a choice, but for notes. Without `predict` it has no times and no
    memory."""
    check_time()
    if problem.batch % choice.num_microbatches:
        legal = [m for m in range(1, problem.batch + 1) if problem.batch % m == 0]
        near = min(legal, key=lambda m: abs(m - choice.num_microbatches))
        raise PlanError(
            f"global batch {problem.batch} does not split into {choice.num_microbatches} equal "
            f"micro-batches; nearest is {near}"
        )
    kinds = sorted({(stage.model, stage.variant) for stage in choice.stages})
    schedule = choice.table()
    plan = Plan(
        model=_model_id(problem),
        cluster=cluster_id(problem.cluster),
        global_batch_size=problem.batch,
        num_microbatches=choice.num_microbatches,
        optimizer=problem.optimizer,
        precision=problem.precision,
        max_grad_norm=problem.max_grad_norm,
        kernels=problem.graph.fusions,
        style=problem.tables.style,
        routing=problem.routing,
        objective=problem.objective,
        constraints=tuple(map(str, problem.constraints)),
        stages=tuple(_stage(problem, choice, stage) for stage in choice.stages),
        schedule=ScheduleTable(name=choice.schedule, rows=schedule.rows),
        layouts=tuple(layout for kind in kinds for layout in problem.layouts(*kind)),
        profile=profile_id(problem),
    )
    for name, of_plan in _applied()[1].items():
        if (value := pinned(problem.constraints, name)) is not None:
            plan = of_plan(plan, problem.graph, value)
    return settled(problem, plan, predict=predict)


_ids: Memo[None, ModelId] = Memo()


def _model_id(problem: Problem) -> ModelId:
    """Made once: all plans of a problem have the same."""
    known = _ids.of(problem)
    if None not in known:
        known[None] = model_id(problem.graph)
    return known[None]


def profile_id(problem: Problem) -> ProfileId | None:
    """Which measurements the costs rest on."""
    profile = problem.tables.profile
    if profile is None:
        return None
    at = profile.machine
    machine = f"{at.device}, {at.driver}, torch {at.torch}, {at.backend}"
    return ProfileId(machine=machine, fingerprint=profile.fingerprint)


def model_id(graph: Graph) -> ModelId:
    """Which model the graph is of."""
    inputs = [graph.tensors[name] for name in graph.inputs]
    return ModelId(
        name=graph.meta.get("model", "model"),
        fingerprint=graph.fingerprint,
        num_parameters=sum(t.numel for t in graph.parameters),
        num_blocks=len(graph.blocks),
        inputs=tuple(
            InputSpec(name=name, shape=tensor.shape, dtype=tensor.dtype)
            for name, tensor in zip(graph.input_names, inputs, strict=True)
        ),
    )


_OfStage = Callable[[Stage, Value, Callable[[], Schedule]], Stage]
_OfPlan = Callable[[Plan, Graph, Value], Plan]


@cache
def _applied() -> tuple[Mapping[str, _OfStage], Mapping[str, _OfPlan]]:
    """How a stage, and a plan, get what is pinned everywhere; else it is tried on good plans
    only."""
    return (
        {name: found.apply for name, found in DECISIONS.items() if found.apply is not None},
        {name: d.apply_plan for name, d in DECISIONS.items() if d.apply_plan is not None},
    )


def _stage(problem: Problem, choice: Choice, stage: StageChoice) -> Stage:
    blocks = problem.graph.blocks[stage.start : stage.stop]
    used = {block.pattern for block in blocks} | {PRELUDE}
    samples = problem.batch // choice.num_microbatches
    made = Stage(
        first=blocks[0].name,
        last=blocks[-1].name,
        mesh={
            "dp_replicate": stage.dp_replicate,
            "dp_shard": stage.dp_shard,
            **(dict(stage.model) or {"tp": 1}),
        },
        devices=stage.devices,
        batch_shares=stage.shares or balanced(samples, stage.dp),
        zero=stage.zero,  # type: ignore[arg-type]
        prefetch=stage.prefetch,
        recompute=dict.fromkeys(stage.recompute, AGAIN),
        saved=_saved(problem, stage, blocks),
        layouts={
            layout.pattern: layout.name
            for layout in problem.layouts(stage.model, stage.variant)
            if layout.pattern in used
        },
    )
    for name, apply in _applied()[0].items():
        value = pinned(problem.constraints, name)
        made = made if value is None else apply(made, value, choice.table)
    for item in problem.constraints:
        made = item.apply(problem.graph, blocks, made) if isinstance(item, ParametersAs) else made
    if made.prefetch:
        views = folded_views(replace(made, by_parameter={}))
        if not any(exchange_of(view).fetches_ahead for view in views):
            return replace(made, prefetch=0)
    return made


def modes_of(problem: Problem, stage: StageChoice) -> tuple[Mode, ...]:
    """Per block, how it keeps what its backward needs."""
    blocks = problem.graph.blocks[stage.start : stage.stop]
    saved = _saved(problem, stage, blocks)
    held = [saved.get(b.name, saved.get(b.pattern)) for b in blocks]
    return tuple(
        not {b.name, b.pattern}.isdisjoint(stage.recompute)
        if policy is None
        else tuple(sorted(policy.items()))
        for b, policy in zip(blocks, held, strict=True)
    )


def _saved(
    problem: Problem, stage: StageChoice, blocks: Sequence[Block]
) -> dict[str, dict[str, Keeping]]:
    """Policies that are chosen, or asked for of all layers; none where blocks are recomputed."""
    patterns = {b.name: b.pattern for b in blocks} if stage.saved else {}
    patterns |= {pattern: pattern for pattern in patterns.values()}
    policies = {
        name: dict(policy_of(problem, patterns[name], mode))
        for name, mode in stage.saved
        if name in patterns
    }
    named = frozenset(stage.recompute)
    again = {b.pattern for b in blocks if b.name in named or b.pattern in named} if named else ()
    policies |= {
        pattern: dict(pinned_policy(problem, pattern))
        for pattern in recomputable(problem.graph, blocks)
        if pattern not in again and pattern not in policies
    }
    return {name: policy for name, policy in policies.items() if policy}


def even_cuts(work: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Where stages 1, 2, ... start, for about equal work and at least one block each."""
    if not 1 <= num_stages <= len(work):
        raise PlanError(
            f"{num_stages} stages for {len(work)} blocks: each stage needs at least one; "
            f"nearest is {max(1, min(num_stages, len(work)))}"
        )
    ends = list(accumulate(work))
    cuts: list[int] = []
    for stage in range(1, num_stages):
        goal = ends[-1] * stage / num_stages
        first, last = (cuts[-1] if cuts else 0) + 1, len(work) - num_stages + stage
        cuts.append(_nearest(ends, goal, first - 1, last) + 1)
    return tuple(cuts)


def _nearest(ends: Sequence[float], goal: float, start: int, stop: int) -> int:
    """The first of those places of ascending values whose value is nearest to the goal."""
    above = bisect_left(ends, goal, start, stop)
    if above == stop or (above > start and goal - ends[above - 1] <= ends[above] - goal):
        above = bisect_left(ends, ends[above - 1], start, above)
    return above


def block_flops(graph: Graph) -> tuple[float, ...]:
    """Forward flops of each block, and a little more so that none is nothing."""
    return tuple([flops + 1.0 for flops in graph.block_flops])


def uniform_choice(
    problem: Problem,
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    tp: int = 1,
    model: ModelMesh = (),
    variant: str = "",
    zero: int = 0,
    schedule: str = USUAL,
    num_microbatches: int = 1,
    recompute: str = "none",
    prefetch: int = 0,
    cuts: Sequence[int] | None = None,
    stage_dp: Sequence[int] | None = None,
    stage_tp: Sequence[int] | None = None,
) -> Choice:
    """A choice in one line: the same mesh for all `pp` pipeline ranks, unless told per rank.

    `cuts`: numbers of the blocks that begin stages 1, 2, …; `stage_dp`: replicas per pipeline rank
    (dp_shard if `zero` splits, else dp_replicate); `stage_tp`: tp per pipeline rank. `model`: model
    axes where they are not just `tp`.
    """
    graph, per_rank = problem.graph, stages_per_rank(schedule)[0]
    starts = (0, *(cuts if cuts is not None else even_cuts(block_flops(graph), pp * per_rank)))
    table = make_schedule(schedule, len(starts), num_microbatches, pp)
    model = model or model_mesh({"tp": tp})
    meshes = [(dp_replicate, dp_shard, model)] * pp
    if stage_dp is not None:
        meshes = [(1, n, model) if splits(zero) else (n, 1, model) for n in stage_dp]
    if stage_tp is not None:
        tensor = [model_mesh({"tp": t}) for t in stage_tp]
        meshes = [(r, s, t) for (r, s, _), t in zip(meshes, tensor, strict=True)]
    sizes = [r * s * prod(n for _, n in ways) for r, s, ways in meshes]
    ends = list(accumulate(sizes))
    stages = []
    for i, (start, stop) in enumerate(zip(starts, (*starts[1:], len(graph.blocks)), strict=True)):
        rank = table.rank_of(i)
        replicate, shard, ways = meshes[rank]
        stages.append(
            StageChoice(
                start=start, stop=stop, zero=zero if may_share(shard, ways) else 0,
                devices=tuple(range(ends[rank] - sizes[rank], ends[rank])),
                dp_replicate=replicate, dp_shard=shard, model=ways, variant=variant,
                prefetch=prefetch, recompute=recomputable(graph, graph.blocks[start:stop])
                if recompute == AGAIN else (),
            )
        )  # fmt: skip
    return Choice(
        stages=tuple(stages), num_microbatches=num_microbatches, schedule=schedule, num_ranks=pp
    )
