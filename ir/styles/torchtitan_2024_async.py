"""torchtitan of 2024 with asynchronous tensor parallelism, its loss not compiled."""

from dataclasses import replace

from meshwright.ir.styles.torchtitan_2024 import STYLE as PLAIN
from meshwright.ir.styles.torchtitan_async import STYLE as ASYNC

STYLE = replace(
    PLAIN,
    title="torchtitan of 2024, compiled, asynchronous tensor parallelism",
    chunks=ASYNC.chunks,
    pins=ASYNC.pins,
    reference=ASYNC.reference,
)
