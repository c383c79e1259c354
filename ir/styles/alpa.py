"""Alpa (OSDI 2022): XLA on GPUs. The compiler fuses what lies between products; gradients are
reduced after the last micro-batch, one thing after the other."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, ZERO_ONLY, Style

STYLE = Style(
    title="Alpa",
    libraries=2021,
    fused_softmax=True,
    late=("zero0", "zero1", "zero2", "zero3"),
    variants=("plain",),
    parts_borders=True,
    kernels=("layer_norm", "bias_gelu", "gelu", "cross_entropy"),
    pins=(*ZERO_ONLY, "overlap=none"),
    memory=StackMemory(reserved=RESERVED, in_place=True),
    reference="alpa: benchmark/alpa, device_mesh and auto_sharding passes; Zheng et al. 2022, "
    "section 6 (local all-gather between meshes)",
)
