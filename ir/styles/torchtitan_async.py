"""torchtitan with asynchronous tensor parallelism: the compiler cuts gathers and reduce-scatters
into chunks that go beside the products around them (torch._inductor, micro_pipeline_tp)."""

from dataclasses import replace

from meshwright.ir.styles import ZERO_ONLY
from meshwright.ir.styles.torchtitan_compiled import STYLE as PLAIN

STYLE = replace(
    PLAIN,
    title="torchtitan, compiled, asynchronous tensor parallelism",
    chunks=True,
    pins=(*ZERO_ONLY, "overlap=linear"),
    reference="torchtitan docs: enable_async_tensor_parallel; torch/_inductor/fx_passes/"
    "micro_pipeline_tp.py",
)
