"""Models of NVIDIA's published data parallel runs that no library here has."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForPreTraining,
)

from meshwright.testing.networks import ResNet50

BOXES = (4, 6, 6, 6, 4, 4)
"""Default boxes of a place of each of SSD's six feature maps (Liu et al. 2016)."""
CLASSES = 81
"""Of COCO, and none."""


class Pretraining(nn.Module):
    """BERT with its head on as many tokens as are masked."""

    def __init__(self, predictions: int) -> None:
        super().__init__()
        settings = {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096, "vocab_size": 30528, "attn_implementation": "eager",
        }  # fmt: skip
        whole = BertForPreTraining(BertConfig.from_dict(settings))
        self.bert, self.cls, self.predictions = whole.bert, whole.cls, predictions

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.bert(input_ids=ids)
        hidden = found.last_hidden_state[:, : self.predictions]
        return self.cls(hidden, found.pooler_output)[0]  # type: ignore[no-any-return]


class _Residual(nn.Module):
    """A block of a ResNet: two 3 x 3 convolutions, or three with `inner` channels in the middle,
    in groups."""

    def __init__(self, channels: int, inner: int, outer: int, stride: int, groups: int) -> None:
        super().__init__()
        middle = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        if outer == inner:
            layers = [nn.Conv2d(channels, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner),
                      nn.ReLU(inplace=True), nn.Conv2d(inner, outer, 3, 1, 1, bias=False),
                      nn.BatchNorm2d(outer)]  # fmt: skip
        else:
            layers = [nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner),
                      nn.ReLU(inplace=True), middle, nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
                      nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)]  # fmt: skip
        self.body = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != outer:
            convolve = nn.Conv2d(channels, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolve, nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet (He et al. 2015, table 1), ResNeXt (Xie et al. 2017: 32 groups, `widening` 2) and
    Wide-ResNet (Zagoruyko and Komodakis 2016); `widening` 0 has no bottlenecks."""

    def __init__(self, depths: tuple[int, ...], widening: int = 1, groups: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        channels = 64
        for stage, count in enumerate(depths):
            width = 64 * 2**stage
            outer = 4 * width if widening else width
            for index in range(count):
                stride = 2 if stage and not index else 1
                inner = widening * width or width
                layers.append(_Residual(channels, inner, outer, stride, groups))
                channels = outer
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(channels, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images).mean((2, 3)))  # type: ignore[no-any-return]


class VGG(nn.Module):
    """VGG (Simonyan and Zisserman 2014, table 1) by the convolutions of each of its five parts."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for part, count in enumerate(depths):
            for _ in range(count):
                outer = min(512, 64 * 2**part)
                layers += [nn.Conv2d(channels, outer, 3, padding=1), nn.ReLU(inplace=True)]
                channels = outer
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(49 * channels, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096),
            nn.ReLU(inplace=True), nn.Linear(4096, 1000),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))  # type: ignore[no-any-return]


class Logits(nn.Module):
    """A classifier of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images).logits  # type: ignore[no-any-return]


class SSD300(nn.Module):
    """SSD on the first three stages of ResNet-50, the third at stride 1, and five further blocks
    (PyTorch/Detection/SSD, README: model architecture)."""

    def __init__(self) -> None:
        super().__init__()
        whole = ResNet50(width=64, classes=8)
        first = whole.layer3[0]
        for layer in (first.conv2, first.downsample[0]):  # type: ignore[union-attr, index]
            layer.stride = (1, 1)  # type: ignore[union-attr, assignment]
        self.features = nn.Sequential(
            whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1, whole.layer2,
            whole.layer3,
        )  # fmt: skip
        outer = (1024, 512, 512, 256, 256, 256)
        inner = (256, 256, 128, 128, 128)
        self.further = nn.ModuleList(
            _reduced(outer[i], inner[i], outer[i + 1], halves=i < 3) for i in range(len(inner))
        )
        self.places, self.classes = (
            nn.ModuleList(
                nn.Conv2d(channels, values * boxes, 3, padding=1)
                for channels, boxes in zip(outer, BOXES, strict=True)
            )
            for values in (4, CLASSES)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.features(images)
        maps = [x]
        for block in self.further:
            x = block(x)
            maps.append(x)
        found = [
            torch.cat(
                [head(m).reshape(len(m), values, -1) for head, m in zip(heads, maps, strict=True)],
                2,
            )
            for heads, values in ((self.places, 4), (self.classes, CLASSES))
        ]
        return torch.cat(found, 1)


def _reduced(channels: int, inner: int, outer: int, *, halves: bool) -> nn.Module:
    last = nn.Conv2d(inner, outer, 3, 2 if halves else 1, 1 if halves else 0, bias=False)
    return nn.Sequential(
        nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
        last, nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
    )  # fmt: skip


def box_loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of places and classes, (batch, 4 + CLASSES, boxes) against (batch, 5, boxes)."""
    places = functional.smooth_l1_loss(found[:, :4], wanted[:, :4].float())
    return places + functional.cross_entropy(found[:, 4:], wanted[:, 4])


class Summariser(nn.Module):
    """BART large, its targets as long as its sources."""

    def __init__(self) -> None:
        super().__init__()
        settings: dict[str, Any] = {
            "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
            "encoder_attention_heads": 16, "decoder_attention_heads": 16, "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096, "vocab_size": 50265, "use_cache": False,
            "attn_implementation": "eager",
        }  # fmt: skip
        self.model = BartForConditionalGeneration(BartConfig.from_dict(settings))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, decoder_input_ids=ids).logits  # type: ignore[no-any-return]


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
