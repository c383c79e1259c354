"""Plain networks of many kinds: vision, graphs, recurrence, recommendation."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES
from benchmarks.zoo.entry import VOCAB


class UNet(nn.Module):
    """Down with strided convolutions, up with transposed ones, joined by skip connections."""

    def __init__(self, width: int = 8, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.first = _double_conv(3, width)
        self.down = nn.ModuleList(_double_conv(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(_double_conv(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, join, skip in zip(
            reversed(self.up), reversed(self.join), reversed(skips), strict=True
        ):
            x = join(torch.cat([skip, up(x)], 1))
        return self.last(x)  # type: ignore[no-any-return]


def _double_conv(source: int, target: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(source, target, 3, padding=1), nn.GroupNorm(4, target), nn.ReLU(),
        nn.Conv2d(target, target, 3, padding=1), nn.GroupNorm(4, target), nn.ReLU(),
    )  # fmt: skip


class GraphNet(nn.Module):
    """Messages along edges, gathered by index and added up by scatter, as in graph networks."""

    def __init__(self, features: int = 8, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """nodes [b, n, f], edges [b, 2, e] -> [b, classes]."""
        x = torch.relu(self.embed(nodes))
        source, target = edges[:, 0], edges[:, 1]
        for message, update in zip(self.message, self.update, strict=True):
            at = target.unsqueeze(-1).expand(-1, -1, x.shape[-1])
            ends = torch.stack([source, target], 1).flatten(1)
            both = torch.gather(x, 1, ends.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            left, right = both.chunk(2, 1)
            sent = torch.relu(message(torch.cat([left, right], -1)))
            received = torch.zeros_like(x).scatter_add(1, at, sent)
            x = x + torch.relu(update(torch.cat([x, received], -1)))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class OneGraph(nn.Module):
    """All nodes of the batch in one big graph: edges index the nodes of the whole batch."""

    def __init__(self, features: int = 8, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, CLASSES)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        x = torch.relu(self.first(nodes))
        mixed = torch.zeros_like(x).index_add(0, target, x[source])
        return self.second(x + mixed)  # type: ignore[no-any-return]


class TorchTransformer(nn.Module):
    """torch's own encoder-decoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.source(source), self.target(target), tgt_mask=mask)
        return self.head(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A text classifier with stacked GRUs, the last state of both directions."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = kind(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.rnn(self.embed(ids))
        return self.head(output[:, -1])  # type: ignore[no-any-return]


class Cells(nn.Module):
    """An LSTM cell stepped by hand."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCAB, width), nn.LSTMCell(width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :6])
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            states.append(h)
        return self.head(torch.stack(states, 1))  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """A variational autoencoder whose noise comes with the batch."""

    def __init__(self, width: int = 32, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, 64), nn.SiLU(), nn.Linear(64, width))

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        again = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        spread = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return {"loss": F.mse_loss(again, x) + 0.01 * spread}


class Siamese(nn.Module):
    """Two pictures through the same tower, compared with a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.InstanceNorm2d(8, affine=True), nn.ELU(),
            nn.Conv2d(8, 16, 3, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(256, 16),
        )  # fmt: skip

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> dict[str, Tensor]:
        a, b = F.normalize(self.tower(left), dim=-1), F.normalize(self.tower(right), dim=-1)
        apart = (a - b).pow(2).sum(-1)
        loss = torch.where(same > 0, apart, torch.relu(0.5 - apart))
        return {"loss": loss.mean()}


class Temporal(nn.Module):
    """Dilated causal convolutions with weight norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=2**i))
            for i in range(3)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            x = x + torch.relu(layer(F.pad(x, (2 * 2**i, 0))))
        return self.head(x.transpose(1, 2))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """MLP-Mixer with einops-like reshapes and einsum."""

    def __init__(self, width: int = 32, patches: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.mix = nn.ParameterList(torch.randn(patches, patches) * 0.2 for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).flatten(2).transpose(1, 2)
        for mix, norm, layer in zip(self.mix, self.norms, self.layers, strict=True):
            x = x + torch.einsum("bpd,pq->bqd", norm(x), mix)
            x = x + F.gelu(layer(norm(x)))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class NeuralField(nn.Module):
    """Random Fourier features of coordinates, a sine network, an integral over samples."""

    angles: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(3, width // 2))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, points: Tensor) -> Tensor:
        """points [b, s, 3] -> colour [b, 3]: volume rendering along a ray."""
        turned = points @ self.angles
        x = torch.cat([turned.sin(), turned.cos()], -1)
        for layer in self.layers:
            x = torch.sin(layer(x))
        colour, density = self.head(x).split([3, 1], -1)
        passed = torch.exp(-F.softplus(density)).squeeze(-1)
        through = torch.cumprod(torch.cat([torch.ones_like(passed[:, :1]), passed], 1), 1)
        weights = through[:, :-1] * (1 - passed)
        return (weights.unsqueeze(-1) * colour.sigmoid()).sum(1)


class TopKGate(nn.Module):
    """A hand-written mixture of experts: every expert on every token, weighted by a top-k gate."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(experts)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, which = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, which, best)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head((outputs * weights.unsqueeze(-2)).sum(-1))  # type: ignore[no-any-return]
