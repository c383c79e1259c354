"""Plain modules for the model zoo, after the published architectures at tiny widths."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch-norm and a shortcut (He et al. 2015, figure 5)."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        # Small residual branches: else 50 normalisations in a row amplify rounding without bound.
        nn.init.constant_(self.bn3.weight, 0.2)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)  # type: ignore[no-any-return]


class ResNet50(nn.Module):
    """ResNet-50 (He et al. 2015, table 1) with `width` channels for 64.

    `depths` are the blocks of its four parts, for tests that need the kinds but not the number.
    """

    def __init__(
        self, width: int = 4, classes: int = 8, depths: tuple[int, ...] = (3, 4, 6, 3)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.channels = width
        self.layer1 = self._layer(width, depths[0], 1)
        self.layer2 = self._layer(2 * width, depths[1], 2)
        self.layer3 = self._layer(4 * width, depths[2], 2)
        self.layer4 = self._layer(8 * width, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * Bottleneck.expansion, classes)

    def _layer(self, width: int, count: int, stride: int) -> nn.Sequential:
        blocks = []
        for index in range(count):
            blocks.append(Bottleneck(self.channels, width, stride if index == 0 else 1))
            self.channels = width * Bottleneck.expansion
        return nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


class _VGG(nn.Module):
    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]


def vgg19(width: int = 4, classes: int = 8) -> nn.Module:
    """VGG-19 (Simonyan and Zisserman 2014, table 1, column E) with `width` channels for 64."""
    layers: list[nn.Module] = []
    channels = 3
    for multiple, count in ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width * multiple, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width * multiple
        layers.append(nn.MaxPool2d(2))
    hidden = 16 * width
    classifier = nn.Sequential(
        nn.Linear(channels, hidden), nn.ReLU(inplace=True), nn.Dropout(0.0),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(0.0),
        nn.Linear(hidden, classes),
    )  # fmt: skip
    return _VGG(nn.Sequential(*layers), classifier)


class GNMT(nn.Module):
    """LSTM translation model with attention, after Wu et al. 2016: first encoder layer two-way."""

    def __init__(self, vocab: int = 64, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(
            [nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)]
            + [nn.LSTM(width, width, batch_first=True) for _ in range(layers - 1)]
        )
        self.target_embedding = nn.Embedding(vocab, width)
        self.attention_in = nn.LSTM(width, width, batch_first=True)
        self.attention = nn.Linear(width, width, bias=False)
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1)
        )
        self.classifier = nn.Linear(width, vocab)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.source_embedding(source)
        for index, layer in enumerate(self.encoder):
            output, _ = layer(memory)
            memory = output + memory if index > 1 else output
        state, _ = self.attention_in(self.target_embedding(target))
        scores = torch.bmm(self.attention(state), memory.transpose(1, 2)).softmax(-1)
        context = torch.bmm(scores, memory)
        for index, layer in enumerate(self.decoder):
            output, _ = layer(torch.cat([state, context], -1))
            state = output + state if index > 0 else output
        return self.classifier(state)  # type: ignore[no-any-return]


class DLRM(nn.Module):
    """Recommendation model of Naumov et al. 2019: embedding bags, two MLPs, dot interaction."""

    def __init__(self, tables: int = 4, rows: int = 40, width: int = 8, dense: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU()
        )
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip
        lower = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("row", lower[0], persistent=False)
        self.register_buffer("column", lower[1], persistent=False)

    def forward(self, dense: torch.Tensor, bags: torch.Tensor) -> dict[str, torch.Tensor]:
        features = [self.bottom(dense)]
        features += [table(bags[:, index]) for index, table in enumerate(self.tables)]
        stacked = torch.stack(features, 1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.row, self.column]
        return {"logit": self.top(torch.cat([features[0], dots], 1)).squeeze(1)}
