"""What a sample is in tokens."""

from meshwright.ir.plan.plan import Plan


def tokens_per_sample(plan: Plan) -> int:
    """Returns the second dim of an integer input; else 1, and rates are in samples."""
    for first in plan.model.inputs[:1]:
        if first.dtype.startswith("int") and len(first.shape) > 1:
            return first.shape[1]
    return 1
