"""Why a plan lost against another, and plans in a few words."""

from meshwright.ir.plan.plan import MODEL_AXES, ModelMesh, Plan
from meshwright.ir.plan.predicted import Alternative
from meshwright.ir.plan.show import seconds
from meshwright.ir.text.units import size
from meshwright.planner.pins.known import in_order


def kind_of(plan: Plan) -> str:
    """`pp dp tp zero1`: which forms of parallelism a plan uses, whatever their sizes."""
    used = ["pp"] if len(plan.schedule.rows) > 1 else []
    used += ["dp"] if any(stage.dp > 1 for stage in plan.stages) else []
    used += [form for form in FORMS if any(form in forms_of(s.model) for s in plan.stages)]
    for decision in in_order():
        if decision.kind is not None:
            used += sorted({decision.kind(stage) for stage in plan.stages} - {""})
    return " ".join(used)


FORMS = ("cp", "ep", "tp", "2D", "2.5D", "3D")


def forms_of(model: ModelMesh) -> tuple[str, ...]:
    """How a mesh splits a replica, by the names that papers use."""
    sizes = dict(model)
    found: list[str] = [axis for axis in ("cp", "ep", "tp") if axis in sizes]
    if "tp_depth" in sizes:
        equal = len({sizes.get(axis, 1) for axis in ("tp_depth", "tp_row", "tp_col")}) == 1
        found.append("3D" if equal else "2.5D")
    elif "tp_row" in sizes or "tp_col" in sizes:
        found.append("2D")
    return tuple(found)


def meshes_of(plan: Plan) -> str:
    """`pp2 dp4 tp2 zero1`: the sizes."""
    parts = [f"pp{len(plan.schedule.rows)}"] if len(plan.schedule.rows) > 1 else []
    short = {"dp_replicate": "dp", "dp_shard": "shard", "tp_depth": "depth", "tp_row": "row",
             "tp_col": "col"}  # fmt: skip
    for axis in ("dp_replicate", "dp_shard", *MODEL_AXES):
        groups = {stage.devices: stage for stage in plan.stages}
        sizes = [stage.mesh.get(axis, 1) for stage in groups.values()]
        if max(sizes) > 1:
            parts.append(short.get(axis, axis) + _sizes(sizes))
    parts += [word for d in in_order() if d.mesh is not None and (word := d.mesh(plan))]
    return " ".join(parts) or "one device"


def _sizes(sizes: list[int]) -> str:
    """`4`, `3:1`, and `1-4` where there are many ranks."""
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return ":".join(map(str, sizes)) if len(sizes) <= 4 else f"{min(sizes)}-{max(sizes)}"


def name_of(plan: Plan) -> str:
    """The sizes with the words of all decisions: micro-batches, schedule, what is not kept."""
    words = [word for d in in_order() if d.words_of is not None for word in d.words_of(plan)]
    return " ".join([meshes_of(plan), *words])


def parts_of(plan: Plan) -> dict[str, float]:
    """Where the time of a step goes on the rank that waits least, in seconds."""
    assert plan.predicted and plan.predicted.breakdown
    spent = plan.predicted.breakdown
    return {
        "computing": spent.forward_s + spent.backward_s,
        "recomputing": spent.recompute_s,
        "collectives in blocks": spent.tensor_s,
        "waiting": spent.wait_s,
        "gradients": spent.gradients_s,
        "gathering parameters": spent.gather_s,
        "optimizer": spent.optimizer_s,
        "overhead": spent.overhead_s,
        "copies to and from the host": spent.offload_s,
    }


def alternative(plan: Plan, best: Plan, excess_bytes: int) -> Alternative:
    """The entry of a plan that lost against `best`."""
    assert plan.predicted
    if excess_bytes:
        why = f"does not fit: {size(excess_bytes)} too much on a rank"
    else:
        why = _slower(plan, best) or _tied(plan, best)
    return Alternative(
        name=name_of(plan), step_s=plan.predicted.step_s,
        peak_bytes=plan.predicted.peak_bytes, why=why,
    )  # fmt: skip


def _slower(plan: Plan, best: Plan) -> str:
    """By how much, and where most of it goes; nothing for a plan that is not slower."""
    assert plan.predicted and best.predicted
    slower = plan.predicted.step_s / best.predicted.step_s - 1
    if slower <= 0:
        return ""
    mine, theirs = parts_of(plan), parts_of(best)
    worst = max(mine, key=lambda name: mine[name] - theirs[name])
    more = mine[worst] > theirs[worst]
    reason = f": {worst} {seconds(mine[worst])} against {seconds(theirs[worst])}" * more
    return f"{slower:.1%} slower{reason}"


def _tied(plan: Plan, best: Plan) -> str:
    """Why a plan that is as fast or faster lost: where speed is asked for, ties go to what is
    simpler."""
    assert plan.predicted and best.predicted
    faster = 1 - plan.predicted.step_s / best.predicted.step_s
    said = f"{faster:.1%} faster, within the tie" if faster >= 5e-4 else "as fast"
    if best.objective in ("throughput", "batch"):
        for one in (d.machinery for d in in_order() if d.machinery and d.machinery.said):
            own, other = one.of(plan), one.of(best)
            if own > other:
                return f"{said}, but less simple: {one.said} {own} against {other}"
    needs, less = size(plan.predicted.peak_bytes), size(best.predicted.peak_bytes)
    return (
        f"needs more memory: {needs} against {less}"
        if needs != less
        else f"{said}, with as much memory"
    )
