"""BLOOM's Megatron-DeepSpeed before its script set CUDA_LAUNCH_BLOCKING: kernels are launched ahead
of the GPU. Its first table (17 February 2022) reaches 98.9 TFLOP/s a GPU on 80 GPUs, where the
comparison after it has 97.2 without the flag and 91.0 with it."""

from dataclasses import replace

from meshwright.ir.styles import USUAL
from meshwright.ir.styles.bloom import STYLE as BLOCKING

STYLE = replace(BLOCKING, title="Megatron-DeepSpeed of 2022, asynchronous", launching=USUAL)
