"""Parameters, gradients and their sums in float32; torch.autocast casts operands of products to
bfloat16 at each use."""

from meshwright.ir.precision import Precision

PRECISION = Precision(products="bfloat16", autocast="bfloat16", measured_as="bf16")
