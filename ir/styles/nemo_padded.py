"""NeMo's recipes that drop tokens beyond an expert's capacity and pad those that have fewer: all
sizes are known, so that nobody waits for counts."""

from dataclasses import replace

from meshwright.ir.styles.nemo import STYLE as NEMO

STYLE = replace(
    NEMO,
    title="NeMo, experts padded to capacity",
    experts_wait=False,
    reference="NVIDIA/NeMo, callbacks/moe_token_drop.py (capacity factor 1, padded); Megatron-LM "
    "core_v0.12.0, moe/token_dispatcher.py (drop_and_pad: no_sync)",
)
