"""Float32 copies of what is stepped in float64: rounding is small, and all of it is of copies."""

from meshwright.ir.precision import Precision

PRECISION = Precision(
    products="float32", copies="float32", stepped="float64", measured_as="copies32"
)
