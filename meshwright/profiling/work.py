"""What there is to measure for a model on a cluster: the blocks that plans of it can need."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.layout.layout import balanced
from meshwright.ir.plan.plan import (
    BlockLayout,
    ModelMesh,
    Plan,
    ScheduleTable,
    Stage,
    model_mesh,
)
from meshwright.planner.problem.candidates import cluster_id, model_id
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import divisors, microbatch_counts, tensor_sizes
from meshwright.runtime.profiling.tasks import BlockTask


@dataclass(frozen=True, slots=True)
class Local:
    """The part of a micro-batch that a rank has, and the mesh it is in."""

    samples: int
    dp: int
    model: ModelMesh
    compiled: bool = False

    @property
    def model_size(self) -> int:
        return prod(size for _, size in self.model)

    def spot(self, device: str) -> BlockSpot:
        """Its costs without those of links."""
        levels = ((),) * len(self.model)
        return BlockSpot(self.samples, self.dp, self.model, device, (), levels, self.compiled)


def block_tasks(problem: Problem, *, compiled: bool = False) -> list[BlockTask]:
    """Every distinct block at every number of samples and tensor-parallel size that even meshes
    need; those that most plans need come first. `compiled`: as torch.compile makes them too."""
    blocks = distinct_blocks(problem.graph)
    work = _Work(problem)
    for local, uses in locals_of(problem).items():
        layouts = {x.pattern: x for x in problem.layouts(local.model)}
        for block, repeats in blocks:
            for one in (local, replace(local, compiled=True))[: 1 + compiled]:
                work.add(block, one, layouts, uses * repeats)
    return work.ranked()


def tasks_of_plans(problem: Problem, plans: Iterable[Plan]) -> list[BlockTask]:
    """Every distinct block that these plans have."""
    work = _Work(problem)
    for plan in plans:
        for index, stage in enumerate(plan.stages):
            # A stage names the layouts of its own blocks only.
            layouts = {layout.pattern: layout for layout in problem.layouts(stage.model)}
            layouts |= {pattern: plan.layout(name) for pattern, name in stage.layouts.items()}
            for samples in set(stage.batch_shares) - {0}:
                for block in plan.stage_blocks(problem.graph, index):
                    local = Local(samples, stage.dp, stage.model, stage.compile)
                    work.add(block, local, layouts, 1)
    return work.ranked()


@dataclass
class _Work:
    """A task for each key, and how many need it."""

    problem: Problem
    found: dict[str, tuple[int, BlockTask]] = field(default_factory=dict)

    def add(
        self, block: Block, local: Local, layouts: Mapping[str, BlockLayout], uses: int
    ) -> None:
        spot = local.spot(self.problem.tables.device_names[0])
        key = self.problem.tables.blocks.key(block, layouts[block.pattern], spot)
        weight, task = self.found.get(key, (0, None))
        task = task or _task(self.problem, block, local, layouts, key)
        self.found[key] = weight + uses, task

    def ranked(self) -> list[BlockTask]:
        ranked = sorted(self.found.values(), key=lambda entry: -entry[0])
        return [task for _, task in ranked]


def distinct_blocks(graph: Graph) -> list[tuple[Block, int]]:
    """The first of equal blocks, and how many there are."""
    first: dict[tuple[object, ...], Block] = {}
    count: dict[tuple[object, ...], int] = {}
    for block in graph.blocks:
        trained = tuple(graph.tensors[name].requires_grad for name in block.inputs)
        key = block.pattern, trained
        first.setdefault(key, block)
        count[key] = count.get(key, 0) + 1
    return [(block, count[key]) for key, block in first.items()]


def locals_of(problem: Problem) -> dict[Local, int]:
    """What ranks of even meshes have, fewest replicas first, and how many plans need it."""
    found: dict[Local, int] = {}
    for model, dp, microbatches in _meshes(problem):
        for samples in set(balanced(problem.batch // microbatches, dp)) - {0}:
            local = Local(samples, dp, model)
            found[local] = found.get(local, 0) + 1
    return dict(sorted(found.items(), key=lambda entry: entry[0].dp))


def _meshes(problem: Problem) -> Iterator[tuple[ModelMesh, int, int]]:
    """(model axes, dp, micro-batches)"""
    devices = problem.cluster.num_devices
    for tp in tensor_sizes(problem):
        for dp in divisors(devices // tp) if tp <= devices else ():
            for microbatches in microbatch_counts(problem):
                if problem.batch // microbatches >= dp:
                    yield model_mesh({"tp": tp}), dp, microbatches


def _task(
    problem: Problem, block: Block, local: Local, layouts: Mapping[str, BlockLayout], key: str
) -> BlockTask:
    plan, stage = _plan_around(problem, block, local, layouts)
    dtypes = problem.tables.facts.dtypes
    return BlockTask(
        key=key,
        pattern=block.pattern,
        plan=plan,
        stage=stage,
        dtypes={
            name: dtypes[name]
            for name in block.inputs
            if problem.graph.tensors[name].kind is Kind.ACTIVATION
        },
    )


def _plan_around(
    problem: Problem, block: Block, local: Local, layouts: Mapping[str, BlockLayout]
) -> tuple[Plan, int]:
    """A plan with the block alone in a stage, whose number comes with it; nobody runs it."""
    graph = problem.graph
    index = graph.blocks.index(block)
    runs = [graph.blocks[:index], (block,), graph.blocks[index + 1 :]]
    size = local.dp * local.model_size
    stages = tuple(
        Stage(
            first=run[0].name,
            last=run[-1].name,
            mesh={"dp_replicate": local.dp, "dp_shard": 1, **dict(local.model)},
            devices=tuple(range(number * size, (number + 1) * size)),
            batch_shares=(local.samples,) * local.dp,
            compile=local.compiled,
            layouts={p: layouts[p].name for p in {*(b.pattern for b in run), PRELUDE}},
        )
        for number, run in enumerate([run for run in runs if run])
    )
    plan = Plan(
        model=model_id(graph),
        cluster=cluster_id(problem.cluster),
        global_batch_size=graph.batch_size,
        num_microbatches=max(1, graph.batch_size // (local.samples * local.dp)),
        optimizer=problem.optimizer,
        precision=problem.precision,
        kernels=graph.fusions,
        stages=stages,
        schedule=ScheduleTable(name="one_f_one_b", rows=()),
        layouts=tuple(layouts.values()),
    )
    return plan, 1 if index else 0
