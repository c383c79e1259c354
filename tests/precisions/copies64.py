"""Copies in the dtype of what they are of: a job is exact, and all that copies are for is done."""

from meshwright.ir.precision import Precision

PRECISION = Precision(
    products="float64", copies="float64", stepped="float64", measured_as="copies64"
)
