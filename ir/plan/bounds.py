"""What the numbers of a plan may be, before anything is allocated or reckoned with them.

`ir.plan.verify` says whether a plan is sound. This says whether its sizes can be those of a plan at
all.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import prod

from meshwright.ir.cluster.cluster import MAX_DEVICES
from meshwright.ir.extensions import nearest
from meshwright.ir.graph.graph import DTYPE_BYTES, MAX_BATCH, MAX_ELEMENTS
from meshwright.ir.plan.plan import Plan, ScheduleTable, Stage
from meshwright.ir.precision import not_a_precision
from meshwright.ir.styles import STYLES
from meshwright.ir.text.plain_text import SHOWN

MAX_STAGES = 2**16
MAX_ACTIONS = 2**19
"""Of a schedule."""
MAX_PATTERNS = 2**12
"""Of parameters of which a stage says something of its own."""
MAX_SECONDS = 1e10
"""Also of those since 1970."""
MAX_FIGURE = 1e18
MAX_FLOPS = 1e27
"""Of a step of a whole job: one of 405B parameters has 1e19 with 4 Mi tokens."""
LEAST = 1e-12
"""Of what others are divided by."""


_SIGNED = frozenset(
    {"gap", "seed", "gradients", "activations", "communication", "workspace", "halved_bytes"}
)  # fmt: skip
"""What rises within an action is beside what its own micro-batch holds already; a first half of a
backward may free more than it leaves."""


def bound_problems(plan: Plan) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) for each number that no plan can have."""
    yield from _counts(plan)
    yield from _inputs(plan)
    if plan.style and plan.style not in STYLES:
        near = nearest(plan.style[:SHOWN], STYLES)
        yield "style", f"style {plan.style[:SHOWN]!r} is none; nearest is {near!r}"
    if wrong := not_a_precision(plan.precision):
        yield "precision", wrong
    for i, stage in enumerate(plan.stages):
        yield from _stage(f"stages.{i}", stage)
    for i, layout in enumerate(plan.layouts):
        yield from _mesh(f"layouts.{i}.mesh", layout.mesh)
    yield from _actions(plan.schedule)
    for name in ("predicted", "evidence"):
        for problem in figure_problems(name, getattr(plan, name), _SIGNED, frozenset()):
            yield "predicted", problem
    if plan.predicted:
        for name in ("step_s", "samples_per_s"):
            where, figure = f"predicted.{name}", getattr(plan.predicted, name)
            yield from _beyond("predicted", where, figure, LEAST, MAX_FIGURE)


def _beyond(
    rule: str, where: str, value: float, low: float, high: float
) -> Iterator[tuple[str, str]]:
    if not low <= value <= high:
        yield rule, f"{where} is {_short(value)}; it must be between {low:,} and {high:,}"


def _short(value: float) -> str:
    return f"{value:,}" if abs(value) < MAX_FIGURE else f"{value:.3g}"


def _counts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield from _beyond("batch", "global_batch_size", plan.global_batch_size, 1, MAX_BATCH)
    yield from _beyond("batch", "num_microbatches", plan.num_microbatches, 1, MAX_ACTIONS)
    yield from _beyond("cluster", "cluster.num_devices", plan.cluster.num_devices, 1, MAX_DEVICES)
    yield from _beyond("model", "model.num_parameters", plan.model.num_parameters, 0, 10**15)
    yield from _beyond("model", "model.num_blocks", plan.model.num_blocks, 0, 10**6)
    yield from _beyond("stages", "the number of stages", len(plan.stages), 1, MAX_STAGES)
    if plan.max_grad_norm is not None:
        yield from _beyond("max_grad_norm", "max_grad_norm", plan.max_grad_norm, 0, MAX_FIGURE)


def _inputs(plan: Plan) -> Iterator[tuple[str, str]]:
    first = next(iter(plan.model.inputs), None)
    if first is None:
        yield "model", "model.inputs is empty; a step has a batch of one tensor at least"
    elif not first.shape:
        yield "model", "model.inputs.0.shape is []; dim 0 of the first input is the batch"
    for i, spec in enumerate(plan.model.inputs):
        where = f"model.inputs.{i}.shape"
        if spec.dtype not in DTYPE_BYTES:
            near = nearest(spec.dtype, DTYPE_BYTES)
            yield "model", f"model.inputs.{i}.dtype is {spec.dtype[:80]!r}; nearest is {near!r}"
        if min(spec.shape, default=1) < 0 or len(spec.shape) > 64:
            yield "model", f"{where} is {str(spec.shape)[:80]}, which no tensor has"
        elif prod(spec.shape) > MAX_ELEMENTS:
            shape = str(spec.shape)[:80]
            yield "model", f"{where} is {shape}; at most {MAX_ELEMENTS:,} elements are taken"


def _stage(where: str, stage: Stage) -> Iterator[tuple[str, str]]:
    yield from _mesh(f"{where}.mesh", stage.mesh)
    if not stage.devices:
        yield "devices", f"{where}.devices is empty; a stage has at least one"
    count = len(stage.by_parameter)
    yield from _beyond("by_parameter", f"{where}.by_parameter's length", count, 0, MAX_PATTERNS)
    for name, values, low, high in (
        ("devices", stage.devices, 0, MAX_DEVICES - 1),
        ("batch_shares", stage.batch_shares, 0, MAX_BATCH),
        ("prefetch", (stage.prefetch,), -MAX_DEVICES, MAX_DEVICES),
    ):
        odd = next((value for value in values if not low <= value <= high), None)
        if odd is not None:
            yield from _beyond(name, f"{where}.{name}", odd, low, high)


def _mesh(where: str, mesh: dict[str, int]) -> Iterator[tuple[str, str]]:
    for axis, size in mesh.items():
        yield from _beyond("mesh", f"{where}.{axis}", size, 1, MAX_DEVICES)
    if prod(mesh.values()) > MAX_DEVICES and max(mesh.values()) <= MAX_DEVICES:
        product = " x ".join(map(str, mesh.values()))
        yield "mesh", f"{where} is {product[:80]}; at most {MAX_DEVICES:,} devices are taken"


def _actions(table: ScheduleTable) -> Iterator[tuple[str, str]]:
    if not table.rows:
        yield "schedule", "schedule.rows is empty; each pipeline rank has a row"
    count = sum(row.count(" ") + 1 for row in table.rows)
    if count > MAX_ACTIONS:
        yield "schedule", f"the schedule has {count:,} actions; at most {MAX_ACTIONS:,} are taken"


def figure_problems(
    where: str, value: object, signed: frozenset[str], positive: frozenset[str], name: str = ""
) -> Iterator[str]:
    """Numbers inside `value` that no prediction or measurement has: negative ones, but for fields
    in `signed`; 0 for fields in `positive`, by which others are divided; and what overflows."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            own, item = f"{where}.{field.name}", getattr(value, field.name)
            yield from figure_problems(own, item, signed, positive, field.name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from figure_problems(f"{where}.{key}", item, signed, positive)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from figure_problems(f"{where}.{i}", item, signed, positive)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low = -MAX_FIGURE if name in signed else LEAST if name in positive else 0
        yield from (text for _, text in _beyond("", where, value, low, _most(name)))


def _most(name: str) -> float:
    """The largest figure that a field of this name may have."""
    if name.endswith("_flops"):
        return MAX_FLOPS
    return MAX_SECONDS if name.endswith("_s") and "_per_s" not in name else MAX_FIGURE
