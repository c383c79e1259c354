"""Models of pictures whose sizes a wrapper's forward says: traced, and equal to the model that
reads them from the batch. docs/your_model.md tells of these wrappers."""

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.retrace import check_repeats
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from tests.ir.trace.same_gradients import check_same

BATCH, PICTURE = 2, 60
TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 8,
}  # fmt: skip
ROPE = {
    "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    "rope_theta": 1e4,
}  # fmt: skip
QWEN = {"image_token_id": PICTURE, "video_token_id": 61, "vision_start_token_id": 62}


def _tokens(pictures: int) -> dict[str, Tensor]:
    """Words, in which so many tokens stand for parts of a picture."""
    ids = torch.randint(3, 50, (BATCH, pictures + 6))
    ids[:, 2 : 2 + pictures] = PICTURE
    return {"input_ids": ids, "labels": ids.clone()}


class OneSize(nn.Module):
    """Says the sizes itself, where the batch has them."""

    def __init__(self, model: nn.Module, sizes: dict[str, list[int]]) -> None:
        super().__init__()
        self.model, self.sizes = model, sizes

    def forward(self, pixel_values: Tensor, **given: Tensor) -> Tensor:
        said = {name: torch.tensor([x] * len(pixel_values)) for name, x in self.sizes.items()}
        return _loss(self.model(pixel_values=pixel_values, **said, **given))


class Tokens(OneSize):
    """With tokens; Qwen's take the pictures' patches one after the other, and where tokens are."""

    def forward(
        self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor, position_ids: Any = None
    ) -> Tensor:
        said = {name: torch.tensor([x] * len(pixel_values)) for name, x in self.sizes.items()}
        if position_ids is not None:
            said["position_ids"] = position_ids.movedim(1, 0)
            pixel_values = pixel_values.flatten(0, 1)
        return _loss(
            self.model(pixel_values=pixel_values, input_ids=input_ids, labels=labels, **said)
        )


class Patches(OneSize):
    """Without tokens."""

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Tensor) -> Tensor:
        return super().forward(pixel_values, pixel_attention_mask=pixel_attention_mask)


class Towered(OneSize):
    """Calls the tower itself: Idefics leaves out pictures that are all zero, by their values."""

    def forward(self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        inner, patch = self.model.model, VISION["patch_size"]
        sizes = (x // patch for x in pixel_values.shape[-2:])
        there = torch.ones(len(pixel_values), *sizes, dtype=torch.bool)
        seen = inner.vision_model(
            pixel_values=pixel_values.flatten(0, 1), patch_attention_mask=there
        ).last_hidden_state
        seen = inner.connector(seen).flatten(0, 1)
        return _loss(self.model(input_ids=input_ids, labels=labels, mm_encoder_outputs=seen))


def _loss(found: Any) -> Tensor:
    loss = getattr(found, "loss", None)
    return found.last_hidden_state.square().mean() if loss is None else loss


def _pixtral() -> Any:
    config = hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig(image_size=32, **VISION), image_token_id=PICTURE,
        text_config=hf.LlamaConfig(**TEXT), vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32).double(), **_tokens(16)}
    return hf.LlavaForConditionalGeneration(config), Tokens, batch, {"image_sizes": [32, 32]}


def _llava_next() -> Any:
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(image_size=16, **VISION), image_token_id=PICTURE,
        text_config=hf.LlamaConfig(**TEXT), image_grid_pinpoints=[[32, 32], [16, 32]],
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(BATCH, 5, 3, 16, 16).double(), **_tokens(4 + 16 + 4)}
    return hf.LlavaNextForConditionalGeneration(config), Tokens, batch, {"image_sizes": [32, 32]}


def _siglip2() -> Any:
    model = hf.Siglip2VisionModel(hf.Siglip2VisionConfig(num_patches=16, **VISION))
    batch = {
        "pixel_values": torch.randn(BATCH, 16, 192).double(),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.int32),
    }
    return model, Patches, batch, {"spatial_shapes": [4, 4]}


def _idefics3() -> Any:
    config = hf.Idefics3Config(
        vision_config=hf.Idefics3VisionConfig(image_size=32, **VISION), scale_factor=2,
        text_config=hf.LlamaConfig(**TEXT), image_token_id=PICTURE, pad_token_id=0,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(BATCH, 1, 3, 32, 32).double(), **_tokens(4)}
    return hf.Idefics3ForConditionalGeneration(config), Towered, batch, {}


def _added(hidden: Tensor, there: Tensor, seen: Tensor) -> Tensor:
    """What Qwen3-VL adds to hidden states where a picture is, without picking these."""
    return hidden + torch.zeros_like(hidden).masked_scatter(there[..., None], seen)


def _qwen(newer: bool) -> Any:
    text = {**TEXT, "rope_parameters": ROPE}
    vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 8}
    if newer:
        vision |= {
            "intermediate_size": 16, "out_hidden_size": 16, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0], "spatial_merge_size": 2,
        }  # fmt: skip
        text["head_dim"] = 8
        model = hf.Qwen3VLForConditionalGeneration(
            hf.Qwen3VLConfig(vision_config=vision, text_config=text, vision_end_token_id=63, **QWEN)
        )
    else:
        vision["embed_dim"] = 16
        model = hf.Qwen2VLForConditionalGeneration(
            hf.Qwen2VLConfig(vision_config=vision, text_config=text, vision_end_token_id=63, **QWEN)
        )
    batch = {"pixel_values": torch.randn(BATCH, 16, 3 * 2 * 64).double(), **_tokens(4)}
    kinds, grid = (batch["input_ids"] == PICTURE).int(), [1, 4, 4]
    places = model.model.get_rope_index(batch["input_ids"], kinds, torch.tensor([grid] * BATCH))[0]
    batch["position_ids"] = places.movedim(0, 1).contiguous()
    return model, Tokens, batch, {"image_grid_thw": grid}


CASES: dict[str, Any] = {
    "pixtral": _pixtral, "llava_next": _llava_next, "siglip2": _siglip2, "idefics3": _idefics3,
    "qwen2_vl": lambda: _qwen(False), "qwen3_vl": lambda: _qwen(True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrapper_that_says_sizes_is_traced_and_equals_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, kind, batch, sizes = CASES[name]()
    model = model.double().train()
    given = {n: torch.tensor([x] * BATCH) for n, x in sizes.items()} | batch
    if "position_ids" in given:
        given["position_ids"] = given["position_ids"].movedim(1, 0)
        given["pixel_values"] = given["pixel_values"].flatten(0, 1)
    wanted = _loss(model(**given))
    weights = [p for p in model.parameters() if p.requires_grad]
    of_wanted = torch.autograd.grad(wanted, weights, allow_unused=True)
    if name == "qwen3_vl":
        model.model.language_model._deepstack_process = _added
    wrapped = kind(model, sizes)
    graph = trace(wrapped, batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the calls of")
        check_repeats(wrapped, batch, None, graph)  # as a search does for state in Python
    made = interpret(graph, wrapped, batch)[graph.loss]
    of_made = torch.autograd.grad(made, weights, allow_unused=True)
    assert torch.allclose(made, wanted, rtol=1e-12)
    check_same(of_made, of_wanted)


def test_sizes_from_the_batch_are_refused_with_what_to_do() -> None:
    torch.manual_seed(0)
    model, _, batch, sizes = _siglip2()

    class FromBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor
        ) -> Tensor:
            return _loss(self.model(pixel_values, pixel_attention_mask, spatial_shapes))

    batch["spatial_shapes"] = torch.tensor([sizes["spatial_shapes"]] * BATCH)
    with pytest.raises(TraceError, match="A model with pictures") as found:
        trace(FromBatch().double(), batch)
    assert "modeling_siglip2.py:" in str(found.value)
