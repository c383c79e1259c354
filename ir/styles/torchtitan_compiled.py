"""torchtitan whose blocks torch.compile makes kernels of: what lies between products is fused."""

from dataclasses import replace

from meshwright.ir.styles.torchtitan import STYLE as PLAIN

STYLE = replace(
    PLAIN,
    title="torchtitan, compiled",
    kernels=("rms_norm", "swiglu", "rotary", "cross_entropy", "gelu", "layer_norm"),
)
