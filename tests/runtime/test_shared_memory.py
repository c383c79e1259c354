"""Memory of ranks that share a model: predicted beside tracked bytes."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.told_memory import told_of_pinned

WORDS, TOKENS = 512, 128


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=WORDS, hidden_size=128, intermediate_size=344, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=TOKENS,
            use_cache=False,
        ))  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=ids).loss
        return loss


@pytest.mark.filterwarnings("ignore:offload on cpu")
@pytest.mark.parametrize(
    ("precision", "pins"),
    [
        # Results of rings lie so that the next product reads them as they are.
        ("fp32", ("cp=2", "num_microbatches=1")),
        # Gathered behind a cast that does nothing: what is gathered is kept.
        ("fp32", ("tp_col=2", "num_microbatches=1")),
        # What is on its way under a forward has come when that has most.
        ("fp32", ("dp_shard=2", "zero=1", "sync=dear", "num_microbatches=1")),
        ("fp32", ("dp_shard=2", "zero=1", "sync=dear", "num_microbatches=2")),
        # A value that has come is cast once for all products that are one call with it.
        ("bf16-autocast", ("tp=2", "num_microbatches=1", "overlap=gradients")),
        # A rank's part that was cast is there until the next block's parameters have come.
        ("bf16", ("dp_shard=2", "zero=3", "num_microbatches=1", "prefetch=1")),
        # The gradient of a cast is cast back, and as wide as the value until the second half.
        ("bf16-autocast", ("pp=2", "num_microbatches=4", "schedule=zero_bubble")),
        # Nothing is made again: nothing more stays between the halves of a backward.
        ("fp32", ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "saved=offload")),
        # What ops keep of their own results goes with the second half.
        ("fp32", ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "saved=selective")),
    ],
)
def test_memory_of_ranks_that_share_a_model(precision: str, pins: tuple[str, ...]) -> None:
    data = (torch.randint(0, WORDS, (8, TOKENS)),)
    assert told_of_pinned(_Language(), data, precision, *pins) == pytest.approx([1, 1], rel=0.01)
