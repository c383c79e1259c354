"""Megatron-LM as Korthikanti et al. 2022 ran it with sequence parallelism: norms and dropouts are
on parts of the sequence, and what is gathered for a product is gathered again in the backward."""

from dataclasses import replace

from meshwright.ir.styles.megatron_2022 import STYLE as WHOLE

STYLE = replace(
    WHOLE, title="Megatron-LM of 2022, sequence parallelism", variants=("halves",),
    regathers=True, reference="Korthikanti et al. 2022, section 4.2.2",
)  # fmt: skip
