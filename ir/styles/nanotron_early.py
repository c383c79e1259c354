"""nanotron whose sends between pipeline stages let the CPU wait for the GPU, as they did before
early 2025: no value is free late there."""

from dataclasses import replace

from meshwright.ir.styles.nanotron import STYLE as NANOTRON

STYLE = replace(
    NANOTRON,
    title="nanotron with waiting sends",
    memory=replace(NANOTRON.memory, late=None),
)
