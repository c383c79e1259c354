"""What a row's words about precision and recomputation mean."""

from dataclasses import dataclass, replace

from benchmarks.published.measured import RowError
from benchmarks.published.rows import Row
from benchmarks.published.systems import System

FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the layers of a row run."""

    system: System
    dtype: str
    """Of the products with parameters."""
    half: str
    mode: str
    """none, full, core or op."""
    every: int = 1
    """The mode holds for every so-manieth layer."""


def recipe_of(row: Row, system: System) -> Recipe:
    """RowError names words that are not known."""
    words = row.precision.lower()
    # torchtitan's docs/float8.md names torch.compile as required.
    if (row.compiled or "float8" in words) and system.pointwise == "eager":
        system = replace(system, pointwise="compiled")
    half = "float16" if "fp16" in words else "bfloat16"
    if "fp32" in words and not any(w in words for w in ("fp16", "bf16", "mixed")):
        half = "float32"
    dtype = FLOAT8 if "float8" in words or "fp8" in words else half
    mode, every = recompute_mode(row.recompute)
    return Recipe(system, dtype, half, mode, every)


def recompute_mode(words: str) -> tuple[str, int]:
    """(mode, every so-manieth layer) of a table's words."""
    low = words.lower()
    if "every second layer" in low:
        return "full", 2
    if "op" in low and ("sac" in low or "per-op" in low or "selective op" in low):
        return "op", 1
    if "attention" in low or low.strip() == "selective":
        return "core", 1
    if "full" in low:
        return "full", 1
    if low in ("none", "false", ""):
        return "none", 1
    raise RowError(f"recompute {words!r} is not known; full, selective, per-op and none are")
