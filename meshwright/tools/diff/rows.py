"""What differs between two plans, row by row; what is equal is left out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.ir.plan.plan import BlockLayout, Plan
from meshwright.ir.plan.show import ranges
from meshwright.planner.pins.known import DECISIONS


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One difference."""

    section: str
    what: str
    first: str
    second: str


def structure(a: Plan, b: Plan) -> tuple[DiffRow, ...]:
    """What they are for, their stages, layouts and schedules."""
    return (*_asked(a, b), *_stages(a, b), *_schedule(a, b), *_layouts(a, b))


def _differing(section: str, pairs: Iterable[tuple[str, object, object]]) -> Iterator[DiffRow]:
    for what, first, second in pairs:
        if first != second:
            yield DiffRow(section, what, _text(first), _text(second))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _asked(a: Plan, b: Plan) -> Iterator[DiffRow]:
    names = ("global_batch_size", "num_microbatches", "optimizer", "precision", "max_grad_norm",
             "objective", "constraints")  # fmt: skip
    pairs = [
        ("model", a.model.name, b.model.name),
        ("model's structure", a.model.fingerprint, b.model.fingerprint),
        ("cluster", a.cluster.name, b.cluster.name),
        ("cluster's figures", a.cluster.fingerprint, b.cluster.fingerprint),
        ("devices used", a.world_size, b.world_size),
        ("style", a.style or None, b.style or None),
        *((name.replace("_", " "), getattr(a, name), getattr(b, name)) for name in names),
    ]
    return _differing("asked", pairs)


def _stages(a: Plan, b: Plan) -> Iterator[DiffRow]:
    if len(a.stages) != len(b.stages):
        yield DiffRow("stages", "stages", str(len(a.stages)), str(len(b.stages)))
    for index in range(max(len(a.stages), len(b.stages))):
        first, second = (_described(plan, index) for plan in (a, b))
        if not first or not second:
            yield DiffRow(
                "stages", str(index), *(", ".join(_told(x)) or "-" for x in (first, second))
            )
            continue
        pairs = [(key, first.get(key), second.get(key)) for key in first | second]
        yield from _differing("stages", ((f"{index}: {k}", x, y) for k, x, y in pairs))


def _described(plan: Plan, index: int) -> dict[str, str]:
    """A stage in a few words; nothing for one that is not there."""
    if index >= len(plan.stages):
        return {}
    stage = plan.stages[index]
    mesh = " ".join(f"{axis} {n}" for axis, n in stage.mesh.items() if n > 1)
    return {
        "blocks": f"{stage.first} .. {stage.last}",
        "devices": ranges(stage.devices),
        "mesh": mesh or "one device",
        "samples": "+".join(map(str, stage.batch_shares)),
        **{name: found.show(stage) for name, found in DECISIONS.items() if found.show},
        "parameters": "; ".join(f"{k}: {v}" for k, v in stage.by_parameter.items()) or "-",
    }


def _told(described: Mapping[str, str]) -> list[str]:
    """What a stage has beside the usual."""
    return [
        text for name, text in described.items() if name != "samples" and text not in ("-", "0")
    ]


def _schedule(a: Plan, b: Plan) -> Iterator[DiffRow]:
    if a.schedule.name != b.schedule.name:
        yield DiffRow("schedule", "name", a.schedule.name, b.schedule.name)
    if len(a.schedule.rows) != len(b.schedule.rows):
        counts = (str(len(plan.schedule.rows)) for plan in (a, b))
        yield DiffRow("schedule", "pipeline ranks", *counts)
        return
    for rank, (first, second) in enumerate(zip(a.schedule.rows, b.schedule.rows, strict=True)):
        if first != second and a.num_microbatches == b.num_microbatches:
            at, x, y = _first_difference(first.split(), second.split())
            yield DiffRow("schedule", f"rank {rank}, from action {at}", x, y)


SHOWN = 4
"""Actions of a schedule from where it differs."""


def _first_difference(a: list[str], b: list[str]) -> tuple[int, str, str]:
    at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
              min(len(a), len(b)))  # fmt: skip
    first, second = (" ".join(row[at : at + SHOWN]) or "ends" for row in (a, b))
    return at, first, second


def _layouts(a: Plan, b: Plan) -> Iterator[DiffRow]:
    """By block pattern: parameters and ops that are placed otherwise."""
    used_a, used_b = _used(a), _used(b)
    for pattern in dict.fromkeys((*used_a, *used_b)):
        first, second = used_a.get(pattern, ()), used_b.get(pattern, ())
        if not first or not second:
            gone = ("-", "laid out") if not first else ("laid out", "-")
            yield DiffRow("layouts", pattern, *gone)
        elif len(first) == len(second) == 1:
            yield from _layout(pattern, first[0], second[0])
        elif [x.parameters for x in first] != [y.parameters for y in second]:
            yield DiffRow("layouts", pattern, f"{len(first)} ways", f"{len(second)} ways")


def _used(plan: Plan) -> dict[str, tuple[BlockLayout, ...]]:
    """Pattern -> the layouts that stages give it, in order of stages."""
    named = {layout.name: layout for layout in plan.layouts}
    found: dict[str, dict[str, BlockLayout]] = {}
    for stage in plan.stages:
        for pattern, name in stage.layouts.items():
            found.setdefault(pattern, {})[name] = named[name]
    return {pattern: tuple(layouts.values()) for pattern, layouts in found.items()}


def _layout(pattern: str, a: BlockLayout, b: BlockLayout) -> Iterator[DiffRow]:
    keys = dict.fromkeys((*a.parameters, *b.parameters))
    yield from _differing("layouts", (
        (f"{pattern} {key}", _placed(a.parameters.get(key, {})), _placed(b.parameters.get(key, {})))
        for key in keys
    ))  # fmt: skip
    ops = dict.fromkeys((*a.ops, *b.ops))
    changed = [key for key in ops if a.ops.get(key, {}) != b.ops.get(key, {})]
    if changed:
        text = ", ".join(changed[:SHOWN]) + f" and {len(changed) - SHOWN} more" * (
            len(changed) > SHOWN
        )
        yield DiffRow("layouts", f"{pattern}: {len(changed)} ops split otherwise", text, "")


def _placed(where: Mapping[str, str]) -> str:
    split = {axis: text for axis, text in where.items() if text not in ("R", "R|P")}
    return ", ".join(f"{axis} {text}" for axis, text in split.items()) or "whole"
