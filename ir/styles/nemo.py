"""NeMo's recipes on Megatron-Core in NVIDIA's containers: cuDNN's attention, a fused loss, and
collectives of tensor parallelism in chunks beside products (userbuffers). Transformer Engine casts
and turns an operand of an 8-bit product by one kernel (2 + 1 + 1 bytes), and weights once a
step; its linear layers keep what they have cast for the backward.

The CPU's part of a layer of experts is what an eager run took that it held up: 8 B200, Qwen3
30B-A3B in micro-batches of one sequence (Megatron Bridge 25.11), 9.2 ms a layer and micro-batch.
Without dropped tokens and without CUDA graphs it waits for counts (`cuda_sync_point`)."""

from dataclasses import replace

from meshwright.ir.cluster.launching import Casting
from meshwright.ir.styles import ZERO_ONLY
from meshwright.ir.styles.megatron import STYLE as MEGATRON

STYLE = replace(
    MEGATRON,
    title="NeMo",
    attention=0.62,
    fused_softmax=True,
    chunks=True,
    casting=Casting(operand=4, result=4),
    keeps_narrow=True,
    experts_cpu_s=(4.0e-3, 4.0e-3),
    experts_wait=True,
    kernels=(*MEGATRON.kernels, "gather_linear", "linear_scatter"),
    pins=(*ZERO_ONLY, "overlap=linear"),
    reference="Transformer Engine, also module/linear.py (saved_inputmat); attention: "
    "FlashAttention-3 (Shah et al. 2024, figures 5, 6), as fast as which cuDNN's is; Megatron-LM "
    "core_v0.15.0, moe/token_dispatcher.py",
)
