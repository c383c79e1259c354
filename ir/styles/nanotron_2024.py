"""nanotron of autumn 2024 (bench_cluster/template/base_config.py,
tp_linear_async_communication false): linears are torch's own between collectives, and keep the
input that was gathered for them."""

from dataclasses import replace

from meshwright.ir.styles.nanotron import STYLE as NANOTRON

STYLE = replace(
    NANOTRON,
    title="nanotron of 2024",
    launching=replace(NANOTRON.launching, split_forward_s=0.0, split_backward_s=0.0),
    regathers=False,
    memory=replace(NANOTRON.memory, late=None),
)
