"""What a mask picks is counted where a check asks for no more, and is else not known."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret


def torch_compilable_check(holds: object, message: str) -> None:
    """As transformers has it."""
    if isinstance(holds, Tensor):
        torch._check_tensor_all_with(ValueError, holds, lambda: message)
    else:
        torch._check_with(ValueError, bool(holds), lambda: message)


class _Places(nn.Module):
    """Puts features in the place of tokens, after a check or without."""

    def __init__(self, checked: bool) -> None:
        super().__init__()
        self.embed, self.checked = nn.Embedding(8, 4), checked

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        embeds, mask = self.embed(ids), ids == 3
        if not self.checked:
            return embeds[mask].square().mean()
        torch_compilable_check(
            embeds[mask].numel() == features.numel(),
            f"{mask.sum()} tokens",
        )
        mask = mask.unsqueeze(-1).expand_as(embeds)
        assert embeds[mask].numel() == features.numel()
        return embeds.masked_scatter(mask, features).square().mean()


IDS, FEATURES = torch.tensor([[3, 3, 1, 2], [3, 3, 4, 5]]), torch.randn(2, 2, 4)


def test_a_check_counts_what_is_picked() -> None:
    model = _Places(True)
    graph = trace(model, {"ids": IDS, "features": FEATURES})
    assert "aten.masked_scatter.default" in [op.target for op in graph.ops]
    found = interpret(graph, model, {"ids": IDS, "features": FEATURES})[graph.loss]
    assert torch.equal(found, model(IDS, FEATURES))


def test_what_is_picked_for_more_than_a_count_is_not_known() -> None:
    with pytest.raises(TraceError, match=r"`return embeds\[mask\].*needs the values of a tensor"):
        trace(_Places(False), {"ids": IDS, "features": FEATURES})
