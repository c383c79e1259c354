"""What another framework has not of a plan's precision."""

from collections.abc import Collection, Iterator

from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision


def lost_precision(plan: Plan, products: Collection[str], *, sums: bool = False) -> Iterator[str]:
    """Yields what is lost where only products of some dtypes can be asked for, and gradients be
    summed in narrow numbers or not (`sums`)."""
    numbers = precision(plan.precision)
    if numbers.within or numbers.products not in products:
        yield f"precision {plan.precision}"
    elif numbers.sums and not sums:
        yield f"gradients that are summed in {numbers.sums}: they are summed in {numbers.stepped}"
