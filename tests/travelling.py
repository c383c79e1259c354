"""Layouts whose tokens travel to their experts."""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.ir.plan.plan import BlockLayout


def travelling(layouts: Iterable[BlockLayout]) -> tuple[BlockLayout, ...]:
    """Layouts in which tokens go on `ep` to experts that lie there, where these were gathered."""
    strategy = " ".join(["S(0)"] * 5) + " -> S(0)"
    return tuple(
        replace(layout, ops={
            key: {**axes, "ep": strategy} if key.endswith("/experts") else axes
            for key, axes in layout.ops.items()
        }) for layout in layouts
    )  # fmt: skip
