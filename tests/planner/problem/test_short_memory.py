"""Where `auto` pays time for memory: a last product whose logits a device has no room for."""

from dataclasses import replace

import pytest
import torch

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.kernels import SHORT, worth
from meshwright.testing.last_products import LastProduct

TOKENS, WIDTH, WORDS = 8192, 1024, 32_000
LOGITS = 4 * TOKENS * WORDS


@pytest.mark.parametrize(
    ("memory", "devices", "places"),
    [(0.9 * LOGITS / SHORT, 1, 1), (1.1 * LOGITS / SHORT, 1, 0), (0.9 * LOGITS / SHORT, 2, 0)],
)
def test_it_is_put_in_where_memory_is_short(memory, devices, places):
    preset = Cluster.preset("h100-sxm", devices_per_node=devices)
    (kind,) = preset.device_types
    cluster = replace(preset, device_types=(replace(kind, memory_bytes=int(memory)),))
    with torch.device("meta"):
        model, ids = LastProduct(WORDS, WIDTH), torch.zeros(TOKENS, dtype=torch.long)
    graph = trace(
        model, (ids,), kernels=("linear_cross_entropy",), wins=worth([cluster]), precision="fp32"
    )
    (fusion,) = graph.fusions
    assert fusion.places == places
    if not places:
        assert "times as long on h100-sxm" in fusion.missed[0].why
