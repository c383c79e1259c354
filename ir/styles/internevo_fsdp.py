"""InternEvo with PyTorch's FSDP: the adapter of its optimizer flattens nothing and has no buckets
(fsdp_optimizer.py)."""

from dataclasses import replace

from meshwright.ir.styles.internevo import STYLE as ZERO

STYLE = replace(
    ZERO,
    title="InternEvo with FSDP",
    chain_hop_s=0.0,
    memory=replace(ZERO.memory, stepping_flat=0.0, flat_alone_bytes=0),
    reference="InternEvo: train/pipeline.py (wrap_FSDP_model), solver/optimizer/fsdp_optimizer.py",
)
