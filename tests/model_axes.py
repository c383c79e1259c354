"""Models split over several axes, and their plans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from math import prod
from typing import Any

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ClusterId, InputSpec, ModelId, Plan, ScheduleTable, Stage
from meshwright.ir.plan.verify import check
from meshwright.ir.trace.trace import trace
from meshwright.testing import tensor_forms as forms
from meshwright.testing.models import ModelCase

FORMS = forms.forms()


@dataclass(frozen=True)
class Part:
    """A stage: its form, blocks, replicas and what they share."""

    form: str
    blocks: int = 4
    shares: tuple[int, ...] = (4,)
    zero: Any = 0
    recompute: bool = False


def plan_of(
    graph: Graph, parts: Sequence[Part], count: int = 1, schedule: str = "one_f_one_b",
    flat: bool = False,
) -> Plan:  # fmt: skip
    """Stages of these parts, each on ranks of its own."""
    used = {part.form: forms.layouts(graph, FORMS[part.form], flat=flat) for part in parts}
    named = {
        form: [replace(layout, name=f"{layout.name}, {form}") for layout in layouts]
        for form, layouts in used.items()
    }
    sizes = [len(part.shares) * prod(FORMS[part.form].mesh.values()) for part in parts]
    first_blocks = [0, *accumulate(part.blocks for part in parts)]
    first_ranks = [0, *accumulate(sizes)]
    stages = tuple(
        _stage(graph, part, named[part.form], block, range(rank, rank + size))
        for part, block, rank, size in zip(parts, first_blocks, first_ranks, sizes, strict=False)
    )
    made = import_module(f"meshwright.planner.schedules.{schedule}").schedule(
        len(parts), count, len(parts)
    )
    inputs = zip(graph.input_names, (graph.tensors[name] for name in graph.inputs), strict=True)
    plan = Plan(
        model=ModelId(
            name="mlp", fingerprint=graph.fingerprint, num_parameters=0,
            num_blocks=len(graph.blocks),
            inputs=tuple(InputSpec(name=n, shape=t.shape, dtype=t.dtype) for n, t in inputs),
        ),
        cluster=ClusterId(name="local", fingerprint="", num_devices=8),
        global_batch_size=graph.batch_size, num_microbatches=count, optimizer="adam",
        precision="fp64", stages=stages,
        schedule=ScheduleTable(
            name=made.name, rows=tuple(" ".join(map(str, row)) for row in made.ranks)
        ),
        layouts=tuple(layout for layouts in named.values() for layout in layouts),
    )  # fmt: skip
    check(plan, graph)
    return plan


def _stage(graph: Graph, part: Part, layouts: Sequence[Any], block: int, ranks: range) -> Stage:
    blocks = graph.blocks[block : block + part.blocks]
    replicas = len(part.shares)
    return Stage(
        first=blocks[0].name, last=blocks[-1].name,
        mesh={"dp_replicate": 1 if part.zero else replicas,
              "dp_shard": replicas if part.zero else 1, **FORMS[part.form].mesh},
        devices=tuple(ranks), batch_shares=part.shares, zero=part.zero,
        recompute={b.name: "full" for b in blocks if part.recompute},
        layouts={layout.pattern: layout.name for layout in layouts},
    )  # fmt: skip


SEQUENCE = "1d_sequence"


def traced(case: ModelCase) -> Graph:
    return trace(case.model(), case.example(), None, global_batch_size=case.batch_size)
