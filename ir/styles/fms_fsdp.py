"""IBM's fms-fsdp: FSDP with torch.compile."""

from dataclasses import replace

from meshwright.ir.styles.torchtitan_compiled import STYLE as TORCHTITAN

STYLE = replace(
    TORCHTITAN,
    title="fms-fsdp",
    reference="fms_fsdp/policies: mixed_precision.py, ac_handler.py (CheckpointImpl.NO_REENTRANT)",
)
