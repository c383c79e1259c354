"""Megatron-LM as Narayanan et al. 2021 ran it: before asynchronous all-reduces of the input's
gradient (added in 2021-12), gradients reduced after the last micro-batch (DDP local)."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, ZERO_ONLY, Style

STYLE = Style(
    title="Megatron-LM of 2021",
    vocab_multiple=128,
    libraries=2021,
    fused_softmax=True,
    late=("zero0", "zero1", "zero2"),
    variants=("",),
    parts_borders=True,
    kernels=("layer_norm", "bias_gelu", "gelu"),
    pins=(*ZERO_ONLY, "overlap=none"),
    memory=StackMemory(reserved=RESERVED),
    reference="Narayanan et al. 2021, section 4 (4.1: scatter and gather between stages); "
    "megatron/model/distributed.py of v2.4",
)
