"""Puts a rank's part of a job together: groups, tensors, stages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm, Tap, Window
from meshwright.codegen.lower.program import StageProgram
from meshwright.forms.alone import replica_lines
from meshwright.forms.captured import check_capture
from meshwright.forms.copied import check_copies
from meshwright.forms.folding import folded_lines, views_in
from meshwright.forms.grouped import run_of
from meshwright.forms.retention import check as check_retention
from meshwright.forms.running import Held, Lines, Peers, SyncRun
from meshwright.forms.stepping import check_updates
from meshwright.forms.sync import exchange_of, has_taps
from meshwright.forms.sync_findings import check
from meshwright.forms.tables import check_tables
from meshwright.ir.comm.by_store import judged
from meshwright.ir.graph.float8 import check_float8
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.scaled_groups import check_device
from meshwright.ir.ops.experts import has_narrow_experts
from meshwright.ir.placed import used_at
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.precision import autocast_of, copies_of, scaling_of
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.changing import changed
from meshwright.runtime.capture.recorder import LaunchRecorder, recorder_of
from meshwright.runtime.job.weights import fill_stepped, slots, stage_tensors
from meshwright.runtime.messages.messages import pairs_of
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.stage.packing import packing
from meshwright.runtime.stage.stage import StageModule
from meshwright.runtime.step.tied import Tie, find_ties, shared_by_stages
from meshwright.runtime.world.groups import Groups, make_groups
from meshwright.runtime.world.world import backends


@dataclass(frozen=True, eq=False)
class RankParts:
    """Everything that a rank has of the job."""

    rank: int
    programs: tuple[StageProgram, ...]
    groups: Groups
    recorder: Recorder
    stages: dict[int, StageModule]
    lines: dict[int, Lines]
    tensors: dict[int, dict[str, Tensor]]
    """Stage -> graph tensor name -> what its blocks read."""
    missing: tuple[str, ...]
    """Module paths that have no values yet, since the model was on the meta device."""
    ties: tuple[Tie, ...]
    owners: dict[str, int]
    """Graph tensor name -> the lowest rank that has (part of) it."""
    firsts: dict[str, int]
    """Graph tensor name -> the first stage that has it, of what several have."""

    def any_tensor(self, name: str) -> Tensor:
        """What blocks of this rank read under a graph tensor name."""
        return next(tensors[name] for tensors in self.tensors.values() if name in tensors)

    @property
    def held(self) -> tuple[Held, ...]:
        return tuple(h for stage in self.stages.values() for h in stage.sync.held)

    @property
    def reduced(self) -> tuple[Held, ...]:
        """What has gradients between a step's last backward and its update."""
        return tuple(h for stage in self.stages.values() for h in stage.sync.reduced)

    def counted(self, held: Iterable[Held]) -> tuple[Held, ...]:
        """Those that this rank stands for: over all ranks, each element once."""
        return tuple(
            h for h in held if h.primary and self.firsts.get(h.param.name, h.stage) == h.stage
        )

    @property
    def is_settled(self) -> bool:
        """Whether parameters are what the steps taken have made of them."""
        return all(stage.sync.is_settled for stage in self.stages.values())

    def settle(self) -> None:
        """Parameters become so; all ranks call it."""
        for stage in self.stages.values():
            stage.sync.settle()


def build_rank(
    plan: Plan,
    graph: Graph,
    programs: tuple[StageProgram, ...],
    source: Mapping[str, Tensor],
    rank: int,
    device: torch.device,
    seed: int,
    *,
    shared: bool = True,
    rows: RowCounts | None = None,
) -> RankParts:
    """Every rank calls this at the same time: it makes process groups, and ranks tell each other
    which tensors they have. In a dry run nobody else is there (`shared` is False). `rows`: how
    often each row of tables occurs, where somebody has counted."""
    check(plan)
    check_retention(plan)
    check_tables(plan, graph)
    check_copies(plan)
    check_capture(plan, graph)
    if scaling := scaling_of(plan.precision):
        check_float8(scaling)
        if any(has_narrow_experts(op) for op in graph.ops):
            check_device(device)
    check_updates(plan, graph)
    ties = find_ties(graph, plan)
    recorder = Recorder(device)
    launches: LaunchRecorder | None = None
    if any(stage.capture for stage in plan.stages):
        launches = recorder_of(device, by_nccl=backends().get("cuda", "nccl") == "nccl")
    groups = make_groups(
        plan, rank, device, pairs_of(plan, programs, rank),
        (*(line for tie in ties for line in tie.groups), *folded_lines(plan, graph),
         *replica_lines(plan)),
    )  # fmt: skip
    stages, lines, tensors = {}, {}, {}
    copies = copies_of(plan.precision)
    missing: tuple[str, ...] = ()
    for program in programs:
        index = program.index
        stage = plan.stages[index]
        lines[index] = _lines(plan, graph, index, rank, groups, recorder)
        if rows is not None:
            lines[index] = _counted(lines[index], rows)
        tensors[index], absent = stage_tensors(
            program, graph, source, device, as_traced=copies is not None
        )
        missing += absent
        sizes = {"dp": stage.dp, "dp_shard": stage.mesh.get("dp_shard", 1)} | dict(stage.model)
        coordinates = {axis: lines[index].coordinates[axis] for axis in sizes}
        axes = {"dp": lines[index].replicas.group, "dp_shard": lines[index].shards.group,
                **lines[index].model}  # fmt: skip
        comm = Comm(axes, sizes, coordinates, seed, device)
        comm.meter, comm.stage, comm.kernels = recorder, index, used_at(plan, index)
        sync = run_of(slots(program, tensors[index], copies), lines[index], stage)
        if sync.own_states and exchange_of(stage).apart:
            comm.apart = lines[index].own_samples(stage.batch_shares)
            comm.sums_apart = not program.needs_others
            here = tensors[index]
            sync.take_buffers([here[name] for name in changed(graph) if name in here])
        if copies:
            fill_stepped(sync.held, source)
        comm.rows_here = sync.rows_here
        if any(has_taps(view.sync_form) for view in views_of(stage)):
            comm.tap = _tap(comm, program, sync)
        stages[index] = StageModule(
            program, comm, tensors[index], sync, autocast_of(plan.precision), stage.prefetch,
            launches if stage.capture else None,
        )  # fmt: skip
    names = {name for found in tensors.values() for name in found}
    owners = judged(names, _owners) if shared else dict.fromkeys(names, rank)
    firsts = {name: found[0] for name, found in shared_by_stages(graph, plan).items()}
    return RankParts(
        rank, programs, groups, recorder, stages, lines, tensors, missing, ties, owners, firsts
    )


def _tap(comm: Comm, program: StageProgram, sync: SyncRun) -> Tap:
    """What layers of the block that runs tell a stage's synchronisation."""
    paths = {param.name: param.fqn for param in program.params}
    weights = {call.block: [paths.get(name, "") for name in call.params] for call in program.calls}

    def tap(index: int, made: Tensor, read: Tensor, window: Window) -> Tensor:
        return sync.tap(weights[comm.block][index], made, read, window)

    return tap


def _owners(everyone: Sequence[set[str]]) -> dict[str, int]:
    """Graph tensor name -> the lowest rank that has it."""
    found: dict[str, int] = {}
    for rank, theirs in enumerate(everyone):
        for name in theirs:
            found.setdefault(name, rank)
    return found


def _lines(
    plan: Plan, graph: Graph, index: int, rank: int, groups: Groups, recorder: Recorder
) -> Lines:
    stage = plan.stages[index]

    def along(view: Stage) -> Lines:
        at = view.coordinates(rank)
        replicas, shards, copies = (
            Peers(axis, groups.line(view, axis, rank), size, at[axis])
            for axis, size in view.data_axes.items()
        )
        model = {axis: groups.line(view, axis, rank) for axis in dict(view.model)}
        return Lines(
            index, replicas, shards, copies, model, at, recorder, packing(used_at(plan, index))
        )

    whole = along(stage)
    others = [view for view in views_in(plan, graph, index) if view.model != stage.model]
    found = {tuple([a for a in whole.model if a not in dict(v.model)]): along(v) for v in others}
    return replace(whole, folds=found)


def _counted(lines: Lines, rows: RowCounts) -> Lines:
    """The lines with how often rows of tables occur."""
    folds = {fold: _counted(own, rows) for fold, own in lines.folds.items()}
    return replace(lines, counts=rows.each, folds=folds)
