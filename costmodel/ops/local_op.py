"""One op with the shapes of one rank: what a timer is asked about."""

from typing import NamedTuple

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.op_facts import InnerPass


class LocalInput(NamedTuple):
    """A tensor operand as one rank holds it, in the dtype the op computes in."""

    shape: tuple[int, ...]
    nbytes: int
    requires_grad: bool
    is_param: bool
    cast_bytes: int = 0
    """Read and written to bring it into that dtype (autocast); 0 if it is there already."""
    channels_last: bool = False
    """Images whose channels are innermost in memory."""


class LocalOp(NamedTuple):
    """One op with the shapes of one rank and one micro-batch."""

    target: str
    op_class: OpClass
    dtype: str
    flops: float
    """Forward; causal attention counts in full."""
    inputs: tuple[LocalInput, ...]
    outputs: tuple[tuple[int, ...], ...]
    output_bytes: int
    differentiable: bool
    saved_bytes: int | None = None
    """What its backward reads besides the output's gradient; unknown: its operands."""
    causal: bool = False
    """Attention that looks back only: kernels skip the other half of the scores."""
    channels_last: bool = False
    """Its results are images whose channels are innermost in memory."""
    comes_cast: bool = False
    """Of a narrow product: its operand comes from a norm, or an earlier product has cast it."""
    inner: tuple[InnerPass, ...] = ()
    """What its forward calls inside, one after the other, and what its gradients take beside that;
    (): it is one kernel itself."""
