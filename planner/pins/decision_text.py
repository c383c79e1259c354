"""The text form of constraints: `[stage K | block GLOB] NAME RELATION VALUE`, and a few phrases.

tp=2   tp<=4   pp in 1,2,4   num_microbatches>=8   stage 0 zero=3   block h.* recompute=full
overlap=block   compile=true   sync=dear   recompute=stage_aware   block h.* layout=h.* tp2
block h.3 on stage 1   block h.3 starts stage 1
stage 0 devices 0-3,8   stage 0 mesh dp_shard=2,tp=2   stage 0 shares 3,1
stage 0 device_type=v100-32   place h.*.attn tp=R   place *.c_fc.weight tp=S(1)
parameters *.wte.weight zero=0,sync=dear
memory<=60GB   step<=1.2s
"""

import re
from collections.abc import Callable

from meshwright.ir.cluster.cluster import MAX_DEVICES
from meshwright.ir.cluster.device import parse_quantity
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.layout.layout import Shard, parse_placement
from meshwright.ir.plan.plan import MODEL_AXES
from meshwright.ir.text.plain_text import shown
from meshwright.planner.pins.cache_pins import KEY, TablesCached
from meshwright.planner.pins.decisions import (
    EVERYWHERE,
    Constraint,
    MemoryCap,
    OnStage,
    Pin,
    Placed,
    Relation,
    Scope,
    StageDevices,
    StageMesh,
    StageShares,
    StepCap,
    Value,
)
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.pins.parameter_pins import parse_parameters

EXAMPLES = (
    "tp=2, tp<=4, pp in 1,2,4, schedule=gpipe, stage 0 mesh dp_shard=2,tp=2, stage 0 devices 0-3, "
    "block h.3 on stage 1, block h.* recompute=full, saved=offload, place h.*.attn tp=R, "
    "parameters wte.* zero=0, "
    "memory<=60GB, step<=1.2s"
)
_SCOPE = re.compile(r"(?:stage\s+(?P<stage>\d+)|block\s+(?P<block>\S+))\s+(?P<rest>.+)")
_ON_STAGE = re.compile(r"(on|starts)\s+stage\s+(\d+)")
_LIST = re.compile(r"(devices|mesh|shares)\s+(\S.*)")
_PLACE = re.compile(r"place\s+(\S+)\s+(\w+)\s*=\s*(\S+)")
_PARAMETERS = re.compile(r"parameters\s+(\S+)\s+(\S.*)")
_CAP = re.compile(r"(memory|step)\s*<=?\s*(.+)")
_LONG = re.compile(r"(?<![.\d])\d{19,}")
"""Of a whole number: no size of a plan is as long, and Python refuses to read 4,300 digits."""
_PIN = re.compile(r"(\w+)(?:\s*(<=|>=|=)\s*|\s+(in)\s+)(\S.*)")


def parse_constraint(given: str | Constraint) -> Constraint:
    """The constraint that a text names; PlanError with the nearest one that exists."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    if match := _LONG.search(text):
        raise PlanError(
            f"constraint {shown(text)}: a number of {len(match[0])} digits; at most 18 are taken"
        )
    if match := _PLACE.fullmatch(text):
        return _placed(text, *match.groups())
    if match := _PARAMETERS.fullmatch(text):
        pattern, values = match.groups()
        if values.startswith(f"{KEY}="):
            return TablesCached(pattern, ((KEY, values.removeprefix(f"{KEY}=").strip()),))
        return parse_parameters(text, pattern, values)
    if match := _CAP.fullmatch(text):
        return _cap(match[1], match[2])
    scope, rest = _scope(text)
    if match := _ON_STAGE.fullmatch(rest):
        if scope.block:
            return OnStage(scope.block, int(match[2]), starts=match[1] == "starts")
    elif match := _LIST.fullmatch(rest):
        if scope.stage is not None:
            return _LISTS[match[1]](text, scope.stage, match[2].strip())
        raise PlanError(
            f"constraint {text!r}: {match[1]} belong to a stage; write 'stage 0 {rest}'"
        )
    elif match := _PIN.fullmatch(rest):
        return _pin(text, scope, match[1], match[2] or match[3], match[4].strip())
    raise PlanError(f"constraint {given!r} is none that exists; write for example {EXAMPLES}")


def _scope(text: str) -> tuple[Scope, str]:
    match = _SCOPE.fullmatch(text)
    if not match:
        return EVERYWHERE, text
    stage = int(match["stage"]) if match["stage"] else None
    return Scope(stage, match["block"] or ""), match["rest"].strip()


def _cap(name: str, value: str) -> Constraint:
    if name == "memory":
        nbytes = parse_quantity(value, "bytes")
        assert isinstance(nbytes, int)
        return MemoryCap(nbytes)
    seconds = parse_quantity(value, "time")
    assert isinstance(seconds, float)
    if seconds <= 0:
        raise PlanError(f"constraint step<={value}: it must be positive, such as step<=1.2s")
    return StepCap(seconds)


def _pin(text: str, scope: Scope, name: str, relation: str, value: str) -> Pin:
    if name not in DECISIONS:
        raise PlanError(
            f"constraint {text}: there is no {name!r}; nearest is {nearest(name, DECISIONS)!r}"
        )
    decision = DECISIONS[name]
    if decision.scope == "plan" and scope != EVERYWHERE:
        raise PlanError(
            f"constraint {text}: {name} is a decision of the whole plan; write {name}{relation}"
            f"{value}"
        )
    if decision.scope == "blocks" and not scope.block:
        raise PlanError(
            f"constraint {text}: a {name} is of blocks; write 'block h.* {name}={value}'"
        )
    if relation in ("<=", ">=") and decision.words is not None:
        raise PlanError(f"constraint {text}: a word has no order; write {name}={value}")
    parts = value.split(",") if relation == "in" else [value]
    values = tuple(_value(text, name, part.strip()) for part in parts)
    if relation == "in":
        ordered = sorted(set(values), key=lambda v: (str(type(v)), v))
        pin = Pin(name, tuple(ordered), "in", scope)
    else:
        sign: Relation = "=" if relation == "=" else "<=" if relation == "<=" else ">="
        pin = Pin(name, values[0], sign, scope)
    if decision.check is not None:
        decision.check(text, pin)
    return pin


def _value(text: str, name: str, value: str) -> Value:
    decision = DECISIONS[name]
    found = decision.legal(value)
    if found is None and decision.words is None:
        raise PlanError(f"constraint {text}: {name} must be {decision.numbers()}")
    if found is None:
        near = nearest(value, decision.words or ())
        raise PlanError(f"constraint {text}: nearest legal value is {near!r}")
    return found


def _placed(text: str, pattern: str, axis: str, placement: str) -> Placed:
    axes = ("model", *MODEL_AXES)
    if axis not in axes:
        raise PlanError(f"constraint {text!r}: no model axis {axis!r}; nearest is "
                        f"{nearest(axis, axes)!r}")  # fmt: skip
    if placement in ("R", "S"):
        return Placed(pattern, axis, placement)
    if placement in ("P", "R|P"):
        raise PlanError(f"constraint {text!r}: parameters lie whole or split; nearest is R")
    found = parse_placement(placement)
    assert isinstance(found, Shard)
    return Placed(pattern, axis, str(found))


def _numbers(text: str, values: str, what: str, least: int) -> tuple[int, ...]:
    parts = [part.strip() for part in values.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise PlanError(f"constraint {text!r}: {what} are whole numbers from {least}, such as 3,1")
    return tuple(map(int, parts))


def _devices(text: str, stage: int, values: str) -> StageDevices:
    found: list[int] = []
    for part in values.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise PlanError(f"constraint {text!r}: devices are ranks and ranges, such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= MAX_DEVICES:
            raise PlanError(
                f"constraint {text!r}: devices are ranks from 0 to {MAX_DEVICES - 1:,}; no cluster "
                "has more"
            )
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise PlanError(f"constraint {text!r}: a device is named twice")
    return StageDevices(stage, tuple(found))


def _mesh(text: str, stage: int, values: str) -> StageMesh:
    axes = ("dp_replicate", "dp_shard", *MODEL_AXES)
    given: dict[str, int] = {}
    for part in values.split(","):
        axis, sign, size = (piece.strip() for piece in part.partition("="))
        if axis not in axes or axis in given:
            again = (
                "is named twice"
                if axis in given
                else f"is none; nearest is {nearest(axis, axes)!r}"
            )
            raise PlanError(f"constraint {text!r}: mesh axis {axis!r} {again}")
        if not sign or not size.isdecimal() or int(size) < 1:
            raise PlanError(f"constraint {text!r}: {axis} must be a whole number from 1")
        given[axis] = int(size)
    return StageMesh(stage, tuple((axis, given[axis]) for axis in axes if axis in given))


def _shares(text: str, stage: int, values: str) -> StageShares:
    return StageShares(stage, _numbers(text, values, "shares", 1))


_LISTS: dict[str, Callable[[str, int, str], Constraint]] = {
    "devices": _devices,
    "mesh": _mesh,
    "shares": _shares,
}
