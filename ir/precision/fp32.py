"""Single precision: numbers as models have them."""

from meshwright.ir.precision import Precision

PRECISION = Precision(products="float32", all_in="float32", measured_as="fp32")
