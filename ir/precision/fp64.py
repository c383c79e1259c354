"""Double precision, for comparisons."""

from meshwright.ir.precision import Precision

PRECISION = Precision(products="float64", all_in="float64", measured_as="fp64")
