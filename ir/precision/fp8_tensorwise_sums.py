"""As fp8-tensorwise, and gradients are summed in bfloat16 as by bf16-sums: NeMo's recipes."""

from dataclasses import replace

from meshwright.ir.precision.fp8_tensorwise import PRECISION as WIDER

PRECISION = replace(WIDER, sums="bfloat16")
