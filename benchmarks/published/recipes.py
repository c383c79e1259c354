"""What a row's words about recomputation mean."""

from benchmarks.published.measured import RowError


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
