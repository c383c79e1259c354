"""Plans as people write them: a few sizes and words, each of which becomes a pin of a search."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import MODEL_AXES
from meshwright.ir.plan.verify import divisors
from meshwright.planner.pins.decisions import STAGE_SIZES
from meshwright.planner.pins.known import DECISIONS, by_hand

SETTINGS = (
    "global_batch_size", "optimizer", "precision", "max_grad_norm", "objective", "seed", "style",
)  # fmt: skip
"""What a search is given besides pins."""
_KINDS: Mapping[str, tuple[Any, str]] = {
    "global_batch_size": (int, "a whole number"),
    "seed": (int, "a whole number"),
    "max_grad_norm": (int | float, "a number"),
}
"""Of settings that are not words."""
_CAPS = ("memory", "step")
_OTHERS = ("micro_batch_size", "constraints", "stages")
_OF_FULL_PLAN = ("schema", "layouts", "hash")
"""Keys that only a whole plan has."""


@dataclass(frozen=True, slots=True)
class Minimal:
    """What a hand-written plan asks for."""

    constraints: tuple[str, ...]
    settings: Mapping[str, Any]
    """Of SETTINGS, those that are given."""


@cache
def keys() -> tuple[str, ...]:
    """Returns the keys of a hand-written plan."""
    return (*by_hand(), *_CAPS, *SETTINGS, *_OTHERS)


@cache
def _keys_of_stage() -> tuple[str, ...]:
    own = (name for name in by_hand() if DECISIONS[name].scope != "plan")
    return (*own, "first", "devices", "shares")


def is_minimal(data: Any) -> bool:
    """Whether parsed JSON is a hand-written plan and not a whole one."""
    return isinstance(data, dict) and not any(key in data for key in _OF_FULL_PLAN)


def parse_minimal(data: Mapping[str, Any], where: str = "plan") -> Minimal:
    """The pins and settings of a hand-written plan; no key is left out silently."""
    _check_keys(data, keys(), where)
    pins = [_pin(where, "", name, data[name]) for name in by_hand() if name in data]
    pins += [f"{name}<={_text(where, name, data[name])}" for name in _CAPS if name in data]
    if "micro_batch_size" in data:
        pins.append(f"num_microbatches={_microbatches(data, where)}")
    pins += _texts(where, data.get("constraints", ()))
    pins += _stages(where, data.get("stages", ()))
    settings = {name: _setting(where, name, data[name]) for name in SETTINGS if name in data}
    return Minimal(tuple(pins), settings)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.0)[0]
            raise PlanError(
                f"{where}: no such key {key!r}; nearest is {near!r}; the keys are "
                f"{', '.join(known)}"
            )


def _pin(where: str, scope: str, name: str, value: Any) -> str:
    if isinstance(value, list) and value:
        return f"{scope}{name} in {','.join(_text(where, name, item) for item in value)}"
    return f"{scope}{name}={_text(where, name, value)}"


def _text(where: str, name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(
            f"{where}: {name} is {value!r}; it must be a whole number, a word or a list of them"
        )
    return str(value)


def _setting(where: str, name: str, value: Any) -> Any:
    kind, what = _KINDS.get(name, (str, "a word"))
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PlanError(f"{where}: {name} is {value!r}; it must be {what}")
    return value


def _texts(where: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise PlanError(
            f"{where}: constraints is {value!r}; it must be a list of texts, such as "
            "['stage 0 recompute=full']"
        )
    return list(value)


def _microbatches(data: Mapping[str, Any], where: str) -> int:
    """Samples of a micro-batch on one replica, as Megatron counts, in numbers of micro-batches."""
    if "num_microbatches" in data:
        raise PlanError(
            f"{where}: micro_batch_size and num_microbatches say the same; keep one of them"
        )
    dp_given = "dp" in data or "dp_shard" in data or "dp_replicate" in data
    if not dp_given or "global_batch_size" not in data:
        raise PlanError(
            f"{where}: micro_batch_size is of one replica: it needs dp_shard, dp_replicate or dp "
            "and global_batch_size beside it; or give num_microbatches"
        )
    names = ("global_batch_size", "micro_batch_size", "dp", "dp_shard", "dp_replicate")
    batch, size, dp, shard, replicate = (_positive(where, n, data.get(n, 1)) for n in names)
    samples = size * (dp if "dp" in data else shard * replicate)
    if batch % samples:
        raise PlanError(
            f"{where}: global_batch_size {batch} is no multiple of micro_batch_size {size} x "
            f"{samples // size} replicas; nearest is {max(1, round(batch / samples)) * samples}"
        )
    return batch // samples


def _positive(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: {name} is {value!r}; it must be a whole number from 1")
    return value


def _stages(where: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, dict) for item in value):
        raise PlanError(
            f"{where}: stages is {value!r}; it must be a list of objects, such as "
            '[{"dp_shard": 3}, {"first": "h.4", "tp": 2}]'
        )
    found = (_stage(f"{where}: stage {i}", i, stage) for i, stage in enumerate(value))
    return [text for texts in found for text in texts]


def _stage(where: str, index: int, stage: Mapping[str, Any]) -> list[str]:
    _check_keys(stage, _keys_of_stage(), where)
    found = []
    for name, value in stage.items():
        if name == "first":
            found.append(f"block {_text(where, name, value)} starts stage {index}")
        elif name in ("devices", "shares"):
            numbers = value if isinstance(value, list) else [value]
            joined = ",".join(_text(where, name, item) for item in numbers)
            found.append(f"stage {index} {name} {joined}")
        else:
            found.append(_pin(where, f"stage {index} ", name, value))
    return found


def check_batch(data: Mapping[str, Any], batch: int, where: str = "plan") -> None:
    """PlanError if the global batch does not split into so many micro-batches."""
    count = data.get("num_microbatches", 1)
    if isinstance(count, int) and batch % max(1, count):
        nearest = min(divisors(batch), key=lambda n: abs(n - count))
        raise PlanError(
            f"{where}: the global batch of {batch} is no multiple of num_microbatches {count}; "
            f"nearest is {nearest}"
        )


def check_devices(data: Mapping[str, Any], num_devices: int, where: str = "plan") -> None:
    """PlanError if the sizes that are given ask for more devices than there are."""
    axes = [n for n in ("pp", *STAGE_SIZES) if isinstance(data.get(n), int)]
    derived = {"dp": ("dp_replicate", "dp_shard"), "model": MODEL_AXES}
    axes = [n for n in axes if not any(part in axes for part in derived.get(n, ()))]
    total = 1
    for name in axes:
        total *= data[name]
    if total > num_devices:
        sizes = " x ".join(f"{name} {data[name]}" for name in axes)
        largest = max(axes, key=lambda n: data[n])
        fits = max(1, data[largest] * num_devices // total)
        raise PlanError(
            f"{where}: {sizes} are {total} devices, the cluster has {num_devices}; nearest is "
            f"{largest} {fits}, or a cluster of {total} devices"
        )
