"""torchtitan whose blocks torch.compile makes kernels of: what lies between products is
fused. Operands of 8-bit products are cast on their shards before they are gathered, where they are
made (2 + 1 bytes), and turned for the weight's gradient (2)."""

from dataclasses import replace

from meshwright.ir.cluster.launching import Casting
from meshwright.ir.styles.torchtitan import STYLE as PLAIN

STYLE = replace(
    PLAIN,
    title="torchtitan, compiled",
    casting=Casting(operand=5, result=5),
    memory=replace(PLAIN.memory, loss_hole_bytes=0),
    kernels=("rms_norm", "swiglu", "rotary", "cross_entropy", "gelu", "layer_norm"),
)
