"""Where calls of blocks may be recorded in CUDA graphs and replayed (`Stage.capture`), and where
not: a replay does what was done when it was recorded, at the same addresses, and tells the host
nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright.forms.copied import copied
from meshwright.forms.exchange import Exchange
from meshwright.forms.sync import exchange_of, has_taps, reads_some_rows
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.placed import joint_kernels, used_at
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import halves_backwards, says_when_to_recompute
from meshwright.ir.precision import precision

RULE = "capture"
_OFF = "capture false"
OF_GPUS = "CUDA graphs are of GPUs, and the plan is for CPUs"
_KEPT = "ops that forbid recording"


def capture_findings(plan: Plan, graph: Graph | None = None) -> Iterator[Finding]:
    """Yields what forbids stages that are to be recorded; without a graph, as far as plans tell."""
    for index, stage in enumerate(plan.stages):
        if not stage.capture:
            continue
        wrong = [*_of_plan(plan, index, stage), *_of_forms(plan, stage)]
        if graph is not None and not wrong:
            wrong += _of_ops(plan, graph, index)
        for message, near in wrong:
            nearest = f"{near}, or {_OFF}" if near else _OFF
            yield Finding(RULE, f"stage {index}: {message}", nearest)


def recorded_where_legal(plan: Plan, graph: Graph) -> Plan:
    """Returns the plan with nothing recorded, if something forbids that in one of its stages."""
    if next(capture_findings(plan, graph), None) is None:
        return plan
    return replace(plan, stages=tuple([replace(stage, capture=False) for stage in plan.stages]))


def check_capture(plan: Plan, graph: Graph) -> None:
    """PlanError with the first thing that forbids it."""
    for finding in capture_findings(plan, graph):
        raise PlanError(str(finding))


def _of_plan(plan: Plan, index: int, stage: Stage) -> Iterator[tuple[str, str]]:
    if plan.cluster.device_kind == "cpu":
        yield OF_GPUS, ""
    schedule = plan.schedule.parse()
    if halves_backwards(schedule) or says_when_to_recompute(schedule):
        what = "halves of backwards" if halves_backwards(schedule) else "blocks made again early"
        yield (
            f"a forward and a backward are recorded as one each; {plan.schedule.name} has {what}",
            ("schedule one_f_one_b"),
        )
    if any(stage.saved.values()):
        yield (
            "the host decides in each micro-batch what becomes of what single ops make",
            "saved of nothing, with recompute full where memory is short",
        )
    if index in paired_stages(plan):
        yield (
            "the schedule has blocks take turns with others, which the host takes",
            ("schedule one_f_one_b"),
        )
    if stage.overlap in ("block", "blocks"):
        yield f"overlap {stage.overlap} runs a block in turns that the host takes", "overlap linear"
    if kernels := sorted(used_at(plan, index) & joint_kernels()):
        yield (
            f"kernel {kernels[0]} counts its turns of the peers' memory on the host",
            (f"kernels without {kernels[0]}"),
        )


def _of_forms(plan: Plan, stage: Stage) -> Iterator[tuple[str, str]]:
    numbers = precision(plan.precision)
    for view in views_of(stage):
        found = exchange_of(view)
        if found.refills:
            yield f"{view.sync_form} brings parameters to other addresses in each pass", "zero 2"
        elif found.on_host or found.row_copies:
            yield (
                "what the host holds or steps is copied between a step's micro-batches",
                "no store",
            )
        elif found.stepped or reads_some_rows(view):
            yield f"{view.sync_form} has other rows of a table in each step", "no sync, no store"
        elif found.late or found.lagging or found.apart or has_taps(view.sync_form):
            yield f"{view.sync_form} holds or reads gradients beyond their backward", "no sync"
        elif _keeps_as_made(copied(found, numbers)) and plan.num_microbatches > 1:
            yield f"{plan.precision} keeps gradients where blocks make them", "precision bf16"
        else:
            continue
        return


def _keeps_as_made(exchange: Exchange) -> bool:
    """Whether sums of gradients are in the dtype in which blocks make them, apart from these."""
    return bool(exchange.copied) and not exchange.copies_apart and (
        exchange.summed == exchange.copied
    )  # fmt: skip


def _of_ops(plan: Plan, graph: Graph, index: int) -> list[tuple[str, str]]:
    wrong = ops_against(graph)
    found = [wrong[block.pattern] for block in plan.stage_blocks(graph, index)]
    return [(why, "") for why in found if why][:1]


def ops_against(graph: Graph) -> Mapping[str, str]:
    """Pattern of blocks -> the first of their ops that forbids it, and why; empty if none does."""
    from meshwright.forms.captured_ops import forbids  # torch is loaded only where needed

    # Kept as cached properties are, with the graph: every plan that is tried asks.
    kept: dict[str, Mapping[str, str]] = graph.__dict__
    if _KEPT not in kept:
        kept[_KEPT] = {
            block.pattern: next(
                (
                    f"{block.name}: {op.key} {why}"
                    for op in graph.block_ops(block)
                    if (why := forbids(op, graph))
                ),
                "",
            )
            for block in graph.distinct_blocks()
        }
    return kept[_KEPT]
