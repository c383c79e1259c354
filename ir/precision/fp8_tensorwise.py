"""As bf16, and products of linear layers are of 8-bit floats, with a scale for each operand
(torchao's `tensorwise`), but for the last layer."""

from meshwright.ir.precision import Precision

PRECISION = Precision(
    products="float8_e4m3fn", copies="bfloat16", linears="tensor", measured_as="fp8_tensorwise"
)
