"""Why a plan lost against another, and plans in a few words."""

from meshwright.ir.plan import MODEL_AXES, Alternative, ModelMesh, Plan
from meshwright.ir.show import seconds, size
from meshwright.planner.saved_names import saved_name


def kind_of(plan: Plan) -> str:
    """`pp dp tp zero1`: which forms of parallelism a plan uses, whatever their sizes."""
    used = ["pp"] if len(plan.schedule.rows) > 1 else []
    used += ["dp"] if any(stage.dp > 1 for stage in plan.stages) else []
    used += [form for form in FORMS if any(form in forms_of(s.model) for s in plan.stages)]
    return " ".join(used + sorted({f"zero{stage.zero}" for stage in plan.stages if stage.zero}))


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
    if zeros := sorted({stage.zero for stage in plan.stages if stage.zero}):
        parts.append("zero" + "/".join(map(str, zeros)))
    return " ".join(parts) or "one device"


def _sizes(sizes: list[int]) -> str:
    """`4`, `3:1`, and `1-4` where there are many ranks."""
    if len(set(sizes)) == 1:
        return str(sizes[0])
    return ":".join(map(str, sizes)) if len(sizes) <= 4 else f"{min(sizes)}-{max(sizes)}"


def name_of(plan: Plan) -> str:
    """The sizes with micro-batches, schedule, and what is not kept."""
    parts = [meshes_of(plan)]
    if plan.num_microbatches > 1:
        parts.append(f"x{plan.num_microbatches}")
    if len(plan.schedule.rows) > 1:
        parts.append(plan.schedule.name)
    if any("full" in stage.recompute.values() for stage in plan.stages):
        parts.append("recompute")
    if (saved := saved_name(plan)) != "none":
        parts.append(saved)
    return " ".join(parts)


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
    assert plan.predicted and best.predicted
    peak = plan.predicted.peak_bytes
    if excess_bytes:
        why = f"does not fit: {size(excess_bytes)} too much on a rank"
    else:
        mine, theirs = parts_of(plan), parts_of(best)
        worst = max(mine, key=lambda name: mine[name] - theirs[name])
        slower = plan.predicted.step_s / best.predicted.step_s - 1
        why = f"{slower:.1%} slower"
        if mine[worst] > theirs[worst]:
            why += f": {worst} {seconds(mine[worst])} against {seconds(theirs[worst])}"
        if slower <= 0:
            why = f"needs more memory: {size(peak)} against {size(best.predicted.peak_bytes)}"
    return Alternative(name=name_of(plan), step_s=plan.predicted.step_s, peak_bytes=peak, why=why)
