"""Blocks read bfloat16 copies of parameters and make bfloat16 gradients; float32 is what these are
summed in and what the optimizer steps (Micikevicius et al. 2018), as in FSDP2 and Megatron."""

from meshwright.ir.precision import Precision

PRECISION = Precision(products="bfloat16", copies="bfloat16", measured_as="bfloat16")
