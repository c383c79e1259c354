"""Bytes as people read them: in powers of two, as devices have them, in all texts of ours."""

SIZES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def size(value: float) -> str:
    """`1.5 GiB` and the like, three digits; 80 GiB is what an A100 of 80 GB has."""
    unit, scale = size_unit(value)
    if scale == 1:
        return f"{value:.0f} B"
    number = value / scale
    return f"{number:,.0f} {unit}" if abs(number) >= 999.5 else f"{number:.3g} {unit}"


def size_unit(value: float) -> tuple[str, float]:
    """The unit that a size is told in, and its bytes."""
    return next(((unit, scale) for unit, scale in SIZES if abs(value) >= scale), ("B", 1.0))
