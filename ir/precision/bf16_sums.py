"""As bf16, and gradients are summed over micro-batches and replicas in bfloat16 too, where ZeRO
sends them: half the bytes, and less exact, as NeMo's recipes and DeepSpeed have it."""

from meshwright.ir.precision import Precision

PRECISION = Precision(
    products="bfloat16", copies="bfloat16", sums="bfloat16", measured_as="bfloat16"
)
