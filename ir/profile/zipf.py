"""`zipf:S`: an assumed distribution, in which the i-th most popular comes in proportion to i^-S."""

from meshwright.ir.errors import PlanError

ZIPF = "zipf:"


def zipf_exponent(text: str, option: str, example: str) -> float:
    """Returns the exponent of `zipf:S`. PlanError names the option, and an example, where it is
    none from 0 to 10."""
    try:
        found = float(text.removeprefix(ZIPF))
    except ValueError:
        found = -1.0
    if not 0 < found < 10:
        raise PlanError(f"{option}={text[:40]!r}: an exponent from 0 to 10, such as {example}")
    return found
