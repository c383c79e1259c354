"""Memory of ranks that share a model: predicted beside tracked bytes."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import meshwright as mw
from tests.small_languages import Language, gpt2, llama, mixtral
from tests.told_memory import told_of_pinned

WORDS, TOKENS = 512, 128


class _OwnLoss(nn.Module):
    """Reads all logits at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _llama() -> nn.Module:
    return llama(WORDS, TOKENS, 128, 344, heads=8)


def _mixtral() -> nn.Module:
    return mixtral(WORDS, TOKENS, 128, 256, heads=8)


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
        # What is held for making values again is gone once they are made.
        ("bf16", ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "saved=selective")),
        # Parameters come for first halves too; gradients land where there is room for their sums.
        ("fp32", ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "store=on_host")),
        ("fp32", ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "store=sums_on_host")),
        ("fp32", ("pp=2", "num_microbatches=4", "schedule=one_f_one_b", "store=on_host")),
        ("bf16", ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "store=on_host")),
        ("bf16", ("pp=2", "num_microbatches=4", "schedule=one_f_one_b", "store=update_on_host")),
    ],
)
def test_memory_of_ranks_that_share_a_model(precision: str, pins: tuple[str, ...]) -> None:
    data = (torch.randint(0, WORDS, (8, TOKENS)),)
    told = told_of_pinned(Language(_llama()), data, precision, *pins)
    assert told == pytest.approx([1, 1], rel=0.01)


def test_what_comes_home_from_attention_by_heads_lies_anew() -> None:
    """The product after it keeps it, though it was traced as a view of what attention has made."""
    data, pins = (torch.randint(0, WORDS, (8, TOKENS)),), ("cp=2", "dp_replicate=2")
    told = told_of_pinned(
        Language(gpt2(WORDS, TOKENS, 128, heads=8)),
        data,
        "fp32",
        *pins,
        "num_microbatches=1",
        ranks=4,
    )
    assert told == pytest.approx([1] * 4, rel=0.01)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_second_halves_make_gradients_of_experts_one_by_one(schedule: str) -> None:
    """What they make is added to what is there; before that, their backward has other things."""
    data, pins = (torch.randint(0, WORDS, (8, 64)),), ("pp=2", "num_microbatches=4")
    told = told_of_pinned(Language(_mixtral()), data, "fp32", *pins, f"schedule={schedule}")
    assert told == pytest.approx([1, 1], rel=0.01)


def test_views_of_what_attention_makes_lie_anew_where_they_are_moved() -> None:
    """An adapter reads whole tokens out of the heads of other ranks, and keeps them."""
    model = mw.adapt(_llama(), "lora", skip="lm_head")
    data = (torch.randint(0, WORDS, (8, TOKENS)),)
    told = told_of_pinned(Language(model), data, "fp32", "tp=2", "num_microbatches=1")
    assert told == pytest.approx([1, 1], rel=0.01)


def test_no_gradient_comes_back_of_what_a_frozen_embedding_has_sent() -> None:
    """There is no room for one. The token ids that it reads count once, as the batch."""
    model = mw.adapt(_llama(), "lora", skip="lm_head")
    data, pins = (torch.randint(0, WORDS, (8, TOKENS)),), ("pp=2", "schedule=one_f_one_b")
    told = told_of_pinned(Language(model), data, "fp32", *pins, "num_microbatches=1")
    assert told == pytest.approx([1, 1], rel=0.001)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_blocks_without_a_gradient_have_what_they_read(precision: str) -> None:
    """None keeps it. What autocast casts for them is there beside its copy, weights too."""
    model = _llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    data = (torch.randint(0, WORDS, (8, TOKENS)),)
    pins = ("pp=2", "num_microbatches=4", "schedule=gpipe")
    told = told_of_pinned(Language(model), data, precision, *pins)
    assert told == pytest.approx([1, 1], rel=0.002)


def test_gradients_of_a_second_half_come_one_after_the_other() -> None:
    """That of a norm, which has most at once, is made before those of products."""
    data = (torch.randint(0, WORDS, (8, TOKENS)),)
    pins = ("pp=2", "num_microbatches=4", "schedule=zero_bubble", "store=sums_on_host")
    told = told_of_pinned(Language(_llama()), data, "fp32", *pins)
    assert told == pytest.approx([1, 1], rel=0.002)


def test_gradients_of_copies_of_weights_are_narrow_until_their_product_has_run() -> None:
    """They are added to those in float32 one by one. The first op of a backward has all that was
    made again beside them."""
    data = (torch.randint(0, WORDS, (8, TOKENS)),)
    pins = ("pp=2", "num_microbatches=4", "schedule=last_no_recompute_1f1b")
    told = told_of_pinned(Language(_llama()), data, "bf16-autocast", *pins, recompute="full")
    assert told == pytest.approx([1, 1], rel=0.005)


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 32, 32]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), y)


def test_batch_norms_of_split_channels_are_one_operator() -> None:
    data = (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    told = told_of_pinned(_Convolutions(), data, "fp32", "tp=2", "num_microbatches=1")
    assert told == pytest.approx([1, 1], rel=0.01)


def test_masks_of_a_whole_batch_are_not_those_of_a_part() -> None:
    """No scores are made for them."""
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    data = (torch.randint(0, WORDS, (8, 64)), torch.ones(8, 64, dtype=torch.long))
    pins = ("pp=2", "num_microbatches=4", "schedule=one_f_one_b")
    told = told_of_pinned(_Masked(BertForMaskedLM(config)), data, "bf16-autocast", *pins)
    assert told == pytest.approx([1, 1], rel=0.005)


class _Masked(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, attention_mask=mask, labels=ids).loss
        return loss


def test_parameters_ahead_are_on_their_way_when_gradients_go() -> None:
    data, pins = (torch.randint(0, WORDS, (8, 64)),), ("dp_shard=2", "zero=3", "prefetch=1")
    told = told_of_pinned(Language(_mixtral()), data, "bf16", *pins, "num_microbatches=2")
    assert told == pytest.approx([1, 1], rel=0.01)


def test_pieces_of_a_zigzag_are_there_beside_what_they_are_put_in_order_to() -> None:
    data, pins = (torch.randint(0, WORDS, (8, TOKENS)),), ("cp=2", "num_microbatches=1")
    told = told_of_pinned(_OwnLoss(_llama()), data, "fp32", *pins)
    assert told == pytest.approx([1, 1], rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_gradients_that_were_gathered_are_whole(precision: str) -> None:
    """That of the experts' result is, all through their backward. Which rank has more tokens is up
    to the router: of both together the sum is told."""
    data, pins = (torch.randint(0, WORDS, (8, 64)),), ("tp=2", "num_microbatches=1")
    told = told_of_pinned(Language(_mixtral()), data, precision, *pins)
    assert sum([1 / ratio for ratio in told]) / 2 == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("layers", [2, 4])
def test_forwards_keep_nothing_of_what_is_made_again(layers: int) -> None:
    """Their most is in the op that reads and makes most then; what enters is there beside it. Of
    two layers the last stage is the head alone, whose first halves free more than they leave."""
    model = gpt2(WORDS, TOKENS, 128, heads=8, layers=layers)
    data = (torch.randint(0, WORDS, (16, TOKENS)),)
    pins = ("pp=2", "num_microbatches=4", "schedule=synthesised", "saved=selective")
    told = told_of_pinned(Language(model), data, "bf16-autocast", *pins)
    assert told == pytest.approx([1, 1], rel=0.01)
