"""All in float32, and GPUs with tensor cores round operands of products to 10 bits (TF32)."""

from meshwright.ir.precision import Precision

PRECISION = Precision(products="tf32", all_in="float32", measured_as="tf32")
