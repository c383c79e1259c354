"""What a row of a published table measured: step time, peak memory, and whether it fitted."""

from collections.abc import Mapping
from typing import Any

from benchmarks.published.shapes import Shape
from meshwright.ir.errors import PlanError


class RowError(PlanError):
    """A row that cannot be predicted; the text says what it lacks."""


def part_of(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object inside a row; empty where it is missing."""
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise RowError(f"{key} is {value!r}; it must be an object")
    return value


def fits_of(raw: Mapping[str, Any]) -> bool | None:
    measured = part_of(raw, "measured")
    if measured.get("fits") is False or raw.get("status") == "oom":
        return False
    return True if measured else None


_MEMORY = (
    ("peak_mem_reserved_gib", 2**30, "reserved"),
    ("peak_reserved_mib", 2**20, "reserved"),
    ("peak_mem_gib", 2**30, "reserved"),
    ("peak_mem_gb", 2**30, "allocated"),
    ("mem_gb", 2**30, "device"),
    ("device_mem_gib", 2**30, "device"),
)


def memory_of(measured: Mapping[str, Any], framework: str = "") -> tuple[float | None, str]:
    """Returns what was measured, and what a table's words mean by it. torchtitan logs what is
    reserved (components/metrics.py), whoever reads its log (torchao: parse_torchtitan_logs.py).
    InternEvo's table has whole "GPU Memory (GB)" of training and of a web demo alike, and its
    trainer logs no such figure: taken for what the driver shows, an assumption."""
    for key, unit, kind in _MEMORY:
        if key in measured:
            logs_reserved = kind == "allocated" and "torchtitan" in framework
            return float(measured[key]) * unit, "reserved" if logs_reserved else kind
    return None, ""


def step_of(raw: Mapping[str, Any], shape: Shape, gbs: int, seq: int, gpus: int) -> float | None:
    """Seconds per step; None where the table says that the time is not to be trusted."""
    measured, derived = part_of(raw, "measured"), part_of(raw, "derived")
    if raw.get("usable_throughput") is False or raw.get("suspect"):
        return None
    if "after_pp_fix" in raw and not raw.get("usable_throughput"):
        return None
    if "suspect" in str(raw.get("note", "")):
        return None
    if seconds := measured.get("step_time_s"):
        return float(seconds)
    if rate := measured.get("tokens_per_s_per_gpu"):
        return gbs * seq / (float(rate) * gpus)
    if seconds := derived.get("step_time_s"):
        return float(seconds)
    if (tflops := measured.get("tflops_per_gpu")) and not shape.experts:
        # SC21, Alpa: the recomputed forward counts.
        factor = 96 if "full" in str(raw.get("recompute")) else 72
        return shape.dense_flops(gbs, seq, factor) / (float(tflops) * 1e12 * gpus)
    return None
