"""As fp8-rowwise, and tokens travel to experts in 8-bit floats, as gradients of results do: what
DeepSeek-V3 was trained with (arXiv 2412.19437, 3.3.3), but with one scale for a token."""

from dataclasses import replace

from meshwright.ir.precision.fp8_rowwise import PRECISION as WIDER

PRECISION = replace(WIDER, narrow_tokens=True)
