"""Where `auto` pays time for memory: a last product whose logits a device has no room for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.kernels import SHORT, worth

TOKENS, WIDTH, WORDS = 8192, 1024, 32_000
LOGITS = 4 * TOKENS * WORDS


class LastProduct(nn.Module):
    """A table and the product with another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(torch.tanh(self.table(ids))), ids)


@pytest.mark.parametrize(
    ("memory", "devices", "places"),
    [(0.9 * LOGITS / SHORT, 1, 1), (1.1 * LOGITS / SHORT, 1, 0), (0.9 * LOGITS / SHORT, 2, 0)],
)
def test_it_is_put_in_where_memory_is_short(memory, devices, places):
    preset = Cluster.preset("h100-sxm", devices_per_node=devices)
    (kind,) = preset.device_types
    cluster = replace(preset, device_types=(replace(kind, memory_bytes=int(memory)),))
    with torch.device("meta"):
        model, ids = LastProduct(), torch.zeros(TOKENS, dtype=torch.long)
    graph = trace(
        model, (ids,), kernels=("linear_cross_entropy",), wins=worth([cluster]), precision="fp32"
    )
    (fusion,) = graph.fusions
    assert fusion.places == places
    if not places:
        assert "times as long on h100-sxm" in fusion.missed[0].why
