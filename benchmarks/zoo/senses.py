"""Vision, audio and multimodal models of transformers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, causal, images, sound, spectrogram, tokens
from benchmarks.zoo.configs import hf
from benchmarks.zoo.entry import Batch, Draw, Entry

STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}


def _classifiers(draw: Draw, **models: dict[str, Any]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name, "vision", hf(f"{own.pop('model')}ForImageClassification", **own), draw)
        for name, own in models.items()
    )


VISION = (*_classifiers(
    images(),
    vit={"model": "ViT"},
    deit={"model": "DeiT"},
    beit={"model": "Beit"},
    dinov2={"model": "Dinov2"},
    ijepa={"model": "IJepa"},
    siglip_vision={"model": "Siglip", "vision_config": {}},
    data2vec_vision={"model": "Data2VecVision"},
    vit_msn={"model": "ViTMSN"},
    poolformer={"model": "PoolFormer", "hidden_sizes": [16, 32], "depths": [1, 1],
                "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
                "padding": [2, 1]},
), *_classifiers(
    images(32),
    resnet={"model": "ResNet", "embedding_size": 16, **STAGES},
    regnet={"model": "RegNet", "embedding_size": 16, **STAGES, "groups_width": 8},
    convnext={"model": "ConvNext", "num_stages": 2, **STAGES, "patch_size": 4},
    convnextv2={"model": "ConvNextV2", "num_stages": 2, **STAGES, "patch_size": 4},
    swin={"model": "Swin", "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
          "num_heads": [2, 4], "window_size": 4},
    swinv2={"model": "Swinv2", "image_size": 32, "patch_size": 2, "embed_dim": 16,
            "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    segformer={"model": "Segformer", "num_encoder_blocks": 2, "depths": [1, 1],
               "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
               "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
               "decoder_hidden_size": 32},
    pvt={"model": "Pvt", "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1],
         "hidden_sizes": [16, 32], "sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2],
         "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
    mobilenet_v1={"model": "MobileNetV1", "depth_multiplier": 0.25, "min_depth": 8},
    mobilenet_v2={"model": "MobileNetV2", "depth_multiplier": 0.25, "min_depth": 8},
    mobilevit={"model": "MobileViT", "image_size": 32, "hidden_sizes": [16, 16, 16],
               "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32], "num_attention_heads": 4,
               "patch_size": 2},
    cvt={"model": "Cvt", "embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3],
         "drop_rate": [0.0, 0.0, 0.0], "attention_drop_rate": [0.0, 0.0, 0.0],
         "drop_path_rate": [0.0, 0.0, 0.0]},
    levit={"model": "Levit", "image_size": 32, "hidden_sizes": [16, 32, 32], "depths": [1, 1, 1],
           "num_attention_heads": [2, 2, 4], "key_dim": [8, 8, 8], "patch_size": 16},
    focalnet={"model": "FocalNet", "image_size": 32, "embed_dim": 16, "depths": [1, 1],
              "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    efficientnet={"model": "EfficientNet", "image_size": 32, "width_coefficient": 0.25,
                  "depth_coefficient": 0.25, "hidden_dim": 320},
    bit={"model": "Bit", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
         "num_groups": 4},
    hiera={"model": "Hiera", "image_size": [32, 32], "patch_stride": [4, 4], "embed_dim": 16,
           "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1, "query_stride": [2, 2],
           "masked_unit_size": [4, 4]},
))  # fmt: skip


def _clip_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The contrastive loss, over all pairs of the batch."""
    logits = output.logits_per_text
    pairs = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2


def _pairs(size: int, generator: torch.Generator) -> Batch:
    ids = tokens(size, generator)
    ids[:, -1] = 2
    pictures = torch.randn(size, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "pixel_values": pictures}


def _captions(size: int, generator: torch.Generator) -> Batch:
    batch = _pairs(size, generator)
    assert isinstance(batch, dict)
    return batch | {"labels": batch["input_ids"].clone()}


IMAGE_TOKEN = 3


def _with_image_tokens(count: int) -> Draw:
    """Text that starts with as many image tokens as the picture has patches."""

    def draw(size: int, generator: torch.Generator) -> Batch:
        ids = tokens(size, generator, 12)
        ids = torch.cat([torch.full((size, count), IMAGE_TOKEN), ids], 1)
        labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
        pictures = torch.randn(size, 3, 16, 16, generator=generator)
        return {"input_ids": ids, "pixel_values": pictures, "labels": labels}

    return draw


def _questions(size: int, generator: torch.Generator) -> Batch:
    batch = _pairs(size, generator)
    assert isinstance(batch, dict)
    return batch | {"labels": torch.rand(size, CLASSES, generator=generator)}


def _caption_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.logits[:, -16:].flatten(0, 1), batch["input_ids"].flatten())


TEXT: dict[str, Any] = {}
MULTIMODAL = (
    Entry("clip", "multimodal", hf("CLIPModel", text_config=TEXT, vision_config={}), _pairs,
          _clip_loss),
    Entry("siglip", "multimodal", hf("SiglipModel", text_config=TEXT, vision_config={}), _pairs,
          _clip_loss),
    Entry("chinese_clip", "multimodal",
          hf("ChineseCLIPModel", text_config=TEXT, vision_config={}), _pairs, _clip_loss),
    Entry("altclip", "multimodal", hf("AltCLIPModel", text_config={"project_dim": 32},
          vision_config={}), _pairs, _clip_loss),
    Entry("vilt", "multimodal", hf("ViltForQuestionAnswering"), _questions),
    Entry("blip", "multimodal", hf("BlipForConditionalGeneration", text_config=TEXT,
          vision_config={}), _captions),
    Entry("git", "multimodal", hf("GitForCausalLM", vision_config={}), _captions),
    Entry("llava", "multimodal",
          hf("LlavaForConditionalGeneration", text_config=TEXT, vision_config={},
             image_token_index=IMAGE_TOKEN), _with_image_tokens(16)),
    Entry("paligemma", "multimodal",
          hf("PaliGemmaForConditionalGeneration", text_config=TEXT, vision_config={},
             image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN), _with_image_tokens(16)),
    Entry("trocr", "multimodal",
          hf("TrOCRForCausalLM"), causal),
)  # fmt: skip

_CONVS = {"conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
          "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 32,
          "mask_time_prob": 0.0, "mask_feature_prob": 0.0}  # fmt: skip


def _speech(size: int, generator: torch.Generator) -> Batch:
    features = torch.randn(size, 24, 16, generator=generator)
    return {"input_features": features, "labels": tokens(size, generator, 12)}


def _patches(size: int, generator: torch.Generator) -> Batch:
    waves = torch.randn(size, 32, 16, generator=generator)
    return {"input_values": waves, "labels": torch.randint(CLASSES, (size,), generator=generator)}


AUDIO = (
    *(
        Entry(name, "audio", hf(f"{stem}ForSequenceClassification", **_CONVS), sound())
        for name, stem in (
            ("wav2vec2", "Wav2Vec2"), ("hubert", "Hubert"), ("wavlm", "WavLM"),
            ("unispeech", "UniSpeech"), ("sew", "SEW"), ("data2vec_audio", "Data2VecAudio"),
        )
    ),
    Entry("whisper", "audio", hf("WhisperForConditionalGeneration", num_mel_bins=16,
          max_source_positions=16, decoder_start_token_id=1, mask_time_prob=0.0,
          mask_feature_prob=0.0), spectrogram(16, 32)),
    Entry("speech_to_text", "audio", hf("Speech2TextForConditionalGeneration",
          input_feat_per_channel=16, conv_channels=32, num_conv_layers=2,
          conv_kernel_sizes=[3, 3]), _speech),
    Entry("ast", "audio", hf("ASTForAudioClassification", max_length=32, num_mel_bins=16,
          patch_size=8, frequency_stride=8, time_stride=8), _patches),
)  # fmt: skip
