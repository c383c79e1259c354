"""The rules of a plan, in one list: what is wrong, by which rule, and the nearest legal value."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from math import isqrt
from typing import Literal

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.host import host_of
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.ir.layout.layout import balanced
from meshwright.ir.layout.samples import share_problem
from meshwright.ir.placed import joint_kernels, used_at
from meshwright.ir.plan.bounds import bound_problems
from meshwright.ir.plan.check_prediction import prediction_problems
from meshwright.ir.plan.finding import SHOWN, Finding, few, nearest_name
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import (
    MESH_AXES,
    MODEL_AXES,
    Plan,
    ScheduleTable,
    Stage,
    mesh_size,
)
from meshwright.ir.plan.sampled import sample_ranks
from meshwright.ir.plan.schedule import Schedule, Work, check_schedule
from meshwright.ir.plan.verify_model import GRAPH_RULES, fitting_layout, mesh_text, model_findings
from meshwright.ir.text.units import SIZES

STAGE_AXES = ("dp_replicate", "dp_shard", *MODEL_AXES)
"""The mesh axes that a stage can have, outermost first."""


def verify(
    plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None
) -> tuple[Finding, ...]:
    """Every broken rule; those on model and cluster only where they are given."""
    if beyond := [Finding(rule, message) for rule, message in islice(bound_problems(plan), SHOWN)]:
        return tuple(beyond)  # nothing may be made of such numbers
    found = [finding for rule in PLAN_RULES for finding in rule(plan)]
    if cluster is not None:
        found += [finding for on_cluster in CLUSTER_RULES for finding in on_cluster(plan, cluster)]
    if graph is not None:
        if identity := list(model_findings(plan, graph)):
            return (*found, *identity)  # nothing else can match if it is another model
        found += [finding for on_graph in GRAPH_RULES for finding in on_graph(plan, graph)]
    return tuple(found)


def check(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> None:
    """PlanError with all errors that `verify` finds."""
    errors = [f for f in verify(plan, graph, cluster) if f.severity == "error"]
    if errors:
        raise PlanError("the plan breaks the rules:\n" + "\n".join(f"  {f}" for f in errors))


def divisors(number: int) -> Iterator[int]:
    """All of them, in the time that their square root takes."""
    for small in range(1, isqrt(number) + 1):
        if number % small == 0:
            yield from (small, number // small)


def _parsed(plan: Plan) -> Schedule | None:
    """The schedule, if it is legal and of the plan's stages."""
    schedule = _legal(plan.schedule)
    sound = not isinstance(schedule, str) and schedule.num_stages == len(plan.stages)
    return schedule if sound and not isinstance(schedule, str) else None


@lru_cache(maxsize=64)
def _legal(table: ScheduleTable) -> Schedule | str:
    """The schedule of a table, or why it is none."""
    try:
        schedule = table.parse()
        check_schedule(schedule)
    except PlanError as error:
        return str(error)
    return schedule


def _kernels(plan: Plan) -> Iterator[Finding]:
    for name in (fusion.kernel for fusion in plan.kernels):
        if name not in KERNELS:
            yield Finding("kernels", f"kernel {name!r} is not known", nearest_name(name, KERNELS))


def _batch(plan: Plan) -> Iterator[Finding]:
    batch, count = plan.global_batch_size, plan.num_microbatches
    if batch % count:
        legal = min(divisors(batch), key=lambda d: abs(d - count))
        message = f"global batch {batch} is not a multiple of {count} micro-batches"
        yield Finding("batch", message, f"{legal} micro-batches")


def _schedule(plan: Plan) -> Iterator[Finding]:
    schedule = _legal(plan.schedule)
    if isinstance(schedule, str):
        yield Finding("schedule", schedule)
        return
    if schedule.num_stages != len(plan.stages):
        message = f"the schedule runs {schedule.num_stages} stages, the plan has {len(plan.stages)}"
        yield Finding("schedule", message, f"{len(plan.stages)} stages in the schedule")
    if schedule.num_microbatches != plan.num_microbatches:
        message = (
            f"the schedule runs {schedule.num_microbatches} micro-batches, "
            f"the plan has {plan.num_microbatches}"
        )
        yield Finding("schedule", message, f"num_microbatches {schedule.num_microbatches}")


def _meshes(plan: Plan) -> Iterator[Finding]:
    for i, stage in enumerate(plan.stages):
        for axis, size in stage.mesh.items():
            if axis not in MESH_AXES:
                message = f"stage {i}: there is no mesh axis {axis!r}"
                yield Finding("mesh", message, nearest_name(axis, STAGE_AXES))
            elif size < 1 or (size > 1 and axis not in STAGE_AXES):
                limit = "1 or more" if axis in STAGE_AXES else "1 inside a stage"
                yield Finding("mesh", f"stage {i}: axis {axis} is {size}; it must be {limit}", "1")
        ordered = [axis for axis in MESH_AXES if axis in stage.mesh]
        if list(stage.mesh) != ordered and not stage.mesh.keys() - set(MESH_AXES):
            message = f"stage {i}: its mesh lists {', '.join(stage.mesh)}; devices are row-major "
            yield Finding("mesh", f"{message}over {', '.join(ordered)}", "that order")
        if mesh_size(stage.mesh) != len(stage.devices):
            message = f"stage {i}: mesh {stage.mesh} needs {mesh_size(stage.mesh)} devices, given "
            yield Finding("mesh", f"{message}{len(stage.devices)}", _nearest_mesh(stage))


def _nearest_mesh(stage: Stage) -> str:
    """One axis that may be changed so that the mesh has as many places as the stage has devices."""
    places, given = mesh_size(stage.mesh), len(stage.devices)
    widest_first = sorted(stage.mesh.items(), key=lambda item: -item[1])
    fits = [(a, given * n // places) for a, n in widest_first if n and given * n % places == 0]
    return f"{fits[0][0]} {fits[0][1]}" if fits and fits[0][1] else f"a mesh of {given}"


def _shares(plan: Plan) -> Iterator[Finding]:
    for i, stage in enumerate(plan.stages):
        samples, shares = plan.samples_per_microbatch, stage.batch_shares
        fair = f"shares {few(balanced(samples, stage.dp))}"
        if len(shares) != stage.dp:
            message = f"stage {i}: {len(shares)} batch shares for a dp axis of {stage.dp}"
            yield Finding("batch_shares", message, fair)
        elif min(shares) < 1:
            near = fair if samples >= stage.dp else f"at most {samples} replicas"
            message = f"stage {i}: batch shares {few(shares)} leave a replica without samples"
            yield Finding("batch_shares", message, near)
        elif sum(shares) != samples:
            message = f"stage {i}: batch shares sum to {sum(shares)}, a micro-batch has {samples}"
            yield Finding("batch_shares", message, fair)
        else:
            yield from _apart(plan, i, stage)


def _apart(plan: Plan, index: int, stage: Stage) -> Iterator[Finding]:
    """Ranks that have samples of their own have equally many of a replica's."""
    axes, ranks = sample_ranks(plan, stage)
    samples, odd = plan.samples_per_microbatch, [n for n in stage.batch_shares if n % ranks]
    if odd:
        near = f"a micro-batch of {-(-samples // (stage.dp * ranks)) * stage.dp * ranks}"
        if samples % ranks == 0 and samples >= stage.dp * ranks:
            fair = [ranks * share for share in balanced(samples // ranks, stage.dp)]
            near = f"shares {few(fair)}"
        message = f"stage {index}: {share_problem(odd[0], ranks, axes)}"
        yield Finding("batch_shares", message, near)


def _devices(plan: Plan) -> Iterator[Finding]:
    for i, stage in enumerate(plan.stages):
        if len(set(stage.devices)) != len(stage.devices):
            twice = Counter(stage.devices).most_common(1)[0][0]
            yield Finding("devices", f"stage {i}: device {twice} appears twice")
    used = {rank for stage in plan.stages for rank in stage.devices}
    if used != set(range(len(used))):
        missing = sorted(set(range(max(used, default=0) + 1)) - used)[:4]
        message = f"every rank of the job needs work: ranks {missing} have none"
        yield Finding("devices", message, f"ranks 0 to {len(used) - 1}")
    schedule = _parsed(plan)
    owners = [schedule.rank_of(s) if schedule else s for s in range(len(plan.stages))]
    groups = [frozenset(stage.devices) for stage in plan.stages]
    firsts: dict[int, int] = {}
    homes: dict[int, int] = {}
    for j, b in enumerate(groups):
        i = firsts.setdefault(owners[j], j)
        if groups[i] != b:
            message = f"stages {i} and {j} are on one pipeline rank but on different devices"
            yield Finding("devices", message)
        shared: dict[int, list[int]] = {}
        for rank in sorted(b):
            other = homes.setdefault(rank, j)
            if owners[other] != owners[j]:
                shared.setdefault(other, []).append(rank)
        for other, ranks in shared.items():
            message = f"stages {other} and {j} are on two pipeline ranks but share devices "
            yield Finding("devices", f"{message}{ranks[:4]}")


def _prefetch(plan: Plan) -> Iterator[Finding]:
    for i, stage in enumerate(plan.stages):
        if stage.prefetch < 0:
            message = f"stage {i}: prefetch {stage.prefetch} blocks must not be negative"
            yield Finding("prefetch", message, "prefetch 0")


def _overlap(plan: Plan) -> Iterator[Finding]:
    schedule = _parsed(plan)
    rows = schedule.ranks if schedule else ()
    split = {a.stage for row in rows for a in row if a.work is Work.BACKWARD_INPUT}
    for i, stage in enumerate(plan.stages):
        if stage.overlap == "none":
            continue
        if i in split:
            message = f"stage {i}: overlap {stage.overlap} needs whole backwards, and the schedule "
            yield Finding("overlap", f"{message}has halves of them", "overlap none")
        elif stage.model_size == 1:
            message = f"stage {i}: overlap {stage.overlap} has no effect without model axes"
            yield Finding("overlap", message, "overlap none", "warning")


def _pairs(plan: Plan) -> Iterator[Finding]:
    """Stages whose actions run together run as they are beside that."""
    if not _parsed(plan):
        return
    for i in sorted(paired_stages(plan)):
        stage = plan.stages[i]
        pairs = f"stage {i}: the schedule has its actions run together with others, and "
        if stage.overlap != "none":
            yield Finding("overlap", f"{pairs}overlap is {stage.overlap}", "overlap none")
        if stage.compile:
            message = f"{pairs}what takes turns is not compiled"
            yield Finding("compile", message, "compile false, or one_f_one_b")
        if taken := sorted(used_at(plan, i) & joint_kernels()):
            message = f"{pairs}kernel {taken[0]} takes over a collective"
            yield Finding("kernels", message, f"kernels without {taken[0]}")


def _compile(plan: Plan) -> Iterator[Finding]:
    schedule = _parsed(plan)
    rows = schedule.ranks if schedule else ()
    split = {a.stage for row in rows for a in row if a.work is Work.BACKWARD_INPUT}
    for i, stage in enumerate(plan.stages):
        if not stage.compile:
            continue
        if i in split:
            message = f"stage {i}: compiled blocks have whole backwards, and the schedule has "
            yield Finding("compile", f"{message}halves of them", "compile false, or one_f_one_b")
        if any(stage.saved.values()):
            message = f"stage {i}: what single ops of compiled blocks keep is torch.compile's to "
            near = "saved of nothing, with recompute full where memory is short, or compile false"
            yield Finding("compile", f"{message}say, and saved says it too", near)


def _layout_names(plan: Plan) -> Iterator[Finding]:
    by_name = {layout.name: layout for layout in plan.layouts}
    if len(by_name) != len(plan.layouts):
        yield Finding("layouts", "two layouts have the same name")
    for i, stage in enumerate(plan.stages):
        for pattern, name in stage.layouts.items():
            layout = by_name.get(name)
            if layout is None:
                message = f"stage {i}: {pattern} uses layout {name!r}, which does not exist"
                yield Finding("layouts", message, nearest_name(name, by_name))
            elif layout.model != stage.model:
                message = f"stage {i} has {mesh_text(stage.model)}, its layout {name!r} is for "
                message += mesh_text(layout.model)
                yield Finding("layouts", message, fitting_layout(plan, pattern, stage))
            elif layout.pattern != pattern:
                message = f"stage {i}: layout {name!r} is for {layout.pattern}, not for {pattern}"
                yield Finding("layouts", message)


def _predicted(plan: Plan) -> Iterator[Finding]:
    for problem in islice(prediction_problems(plan, _parsed(plan)), SHOWN):
        yield Finding("predicted", problem, "predict it anew: check it with --model and --cluster")


def _cluster(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    if plan.cluster.fingerprint != cluster.fingerprint:
        message = f"the plan is for cluster {plan.cluster.name}, given {cluster.name}"
        near = "search again for predictions that hold there"
        severity: Literal["error", "warning"] = "warning"
        if plan.world_size > cluster.num_devices:
            severity, near = "error", f"a cluster of {plan.world_size} devices"
            message += f" with {cluster.num_devices} devices; the plan uses {plan.world_size}"
        yield Finding("cluster", message, near, severity)


_GIB = dict(SIZES)["GiB"]


def _memory(plan: Plan, cluster: Cluster) -> Iterator[Finding]:
    if plan.predicted is None or len(plan.predicted.stages) != len(plan.stages):
        return
    count = cluster.num_devices
    for i, (stage, predicted) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        inside = [rank for rank in stage.devices if 0 <= rank < count]
        # The figure is of the rank with least to spare: which one, only a cost model knows.
        room = max((device.usable_bytes for device in cluster.types_of(inside)), default=0)
        if predicted.memory.used_bytes > room:
            message = (
                f"stage {i} needs {predicted.memory.used_bytes / _GIB:.2f} GiB per device, "
                f"which has {room / _GIB:.2f} GiB"
            )
            yield Finding("memory", message, "recompute, a higher zero, more stages or tp")
        there = [host_of(cluster, device) for device in cluster.types_of(inside)]
        room = min([host.memory_bytes for host in there if host], default=2**60)
        if (needs := predicted.memory.host_bytes) > room:
            message = f"stage {i} needs {needs / _GIB:.2f} GiB of the host for each device, "
            message += f"which has {room / _GIB:.2f} GiB of it"
            yield Finding("memory", message, "no store on the host, or more ranks that share it")


PLAN_RULES: tuple[Callable[[Plan], Iterator[Finding]], ...] = (
    _kernels, _batch, _schedule, _meshes, _devices, _shares, _prefetch,
    _overlap, _pairs, _compile, _layout_names, _predicted,
)  # fmt: skip
CLUSTER_RULES: tuple[Callable[[Plan, Cluster], Iterator[Finding]], ...] = (_cluster, _memory)
