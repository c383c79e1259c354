"""Float16 copies of parameters, and a loss that is scaled so that their gradients do not vanish;
the optimizer steps float32 (Micikevicius et al. 2018). For devices without bfloat16, as V100."""

from meshwright.ir.precision import Precision

PRECISION = Precision(products="float16", copies="float16", scales_loss=True, measured_as="float16")
