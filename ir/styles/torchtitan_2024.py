"""torchtitan of 2024 whose blocks are compiled and whose loss is not (torchtitan pull request 1033
made it so)."""

from dataclasses import replace

from meshwright.ir.styles.torchtitan_compiled import STYLE as LATER

STYLE = replace(
    LATER,
    title="torchtitan of 2024, compiled",
    memory=replace(LATER.memory, loss_hole_bytes=2),
    kernels=tuple(name for name in LATER.kernels if name != "cross_entropy"),
)
