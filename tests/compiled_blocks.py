"""Measured blocks, compiled and not."""

from dataclasses import replace

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.profile.profile import BlockRecord, Profile
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.work import block_tasks
from tests.costmodel.explain.runs import MACHINE
from tests.costmodel.fit.timings import timing
from tests.planner.problems import traced


def profiled(ratio: float, *pins: str) -> Problem:
    """Two CPUs; all blocks were measured, compiled ones at `ratio` of the time of others."""
    graph, machine = traced("gpt2"), Cluster.local(2)
    plain = make_problem(graph, machine, precision="fp32", constraints=pins)
    blocks: dict[str, BlockRecord] = {}
    named = {block.pattern: block for block in graph.blocks}
    for task in block_tasks(plain, compiled=ratio > 0):
        block, stage = named[task.pattern], task.plan.stages[task.stage]
        layout = task.plan.layout(stage.layouts[task.pattern])
        levels = ((),) * len(stage.model)
        spot = BlockSpot(
            task.samples, stage.dp, stage.model, machine.device_types[0].name, (), levels
        )
        cost = plain.tables.blocks.cost(block, layout, spot)
        times = ratio if task.compiled else 1.0
        blocks[task.key] = BlockRecord(
            key=task.key, pattern=task.pattern, samples=task.samples, tp=task.tp, processes=2,
            forward=timing(times * (cost.forward_s - cost.comm_forward_s)),
            backward=timing(times * (cost.backward_s - cost.comm_backward_s)),
            backward_input=None, backward_weight=None,
        )  # fmt: skip
    profile = Profile(machine=replace(MACHINE, kind="cpu"), blocks=blocks)
    return make_problem(graph, machine, precision="fp32", constraints=pins, profile=profile)
