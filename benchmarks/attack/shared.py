"""Models of `layouts` that use one parameter in several places, or keep buffers of their own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attack.odd_ops import CLASSES, WIDTH, WORDS, Model, images, rows, tokens, words


class Heads(nn.Module):
    """Two heads, each with a layer of its own before a linear that both use."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.left, self.right = nn.Linear(24, 24), nn.Linear(24, 24)
        self.shared, self.deep = nn.Linear(24, 24), deep
        self.one, self.two = nn.Linear(24, CLASSES), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        left = self.one(F.gelu(self.shared(torch.tanh(self.left(x)))))
        right = self.right(x)
        if self.deep:
            right = torch.relu(self.shared(right + 1))
        return left + self.two(self.shared(right).softmax(-1))


class Recurring(nn.Module):
    """One layer again and again, with other ops between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 24), nn.LayerNorm(24)
        self.layer = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.mix, self.head = nn.Linear(24, 24, bias=False), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for turn in range(3):
            x = x + self.layer(self.norm(x))
            if turn == 1:
                x = torch.tanh(self.mix(x)) * x.sigmoid()
        return self.head(self.layer(x)).mean(1)


class Tied(nn.Module):
    """The words' embedding is the head, and is used a third time between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mid = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mid(self.table(x)))
        x = x + F.linear(F.linear(x, self.table.weight).softmax(-1), self.table.weight.T)
        x = self.last(x)
        return F.linear(x.mean(1), self.table.weight)[:, :CLASSES]


class Returning(nn.Module):
    """Equal layers, of which one's last weight is used again behind them as a first one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)
        self.extra = nn.Linear(24, 24)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = x + layer(x)
        weight = self.layers[2][2].weight  # type: ignore[index]
        return self.head(self.extra(F.gelu(F.linear(x, weight))))


class Outputs(nn.Module):
    """Two heads of different depth that end in the same linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shared = nn.Linear(WIDTH, 24), nn.Linear(24, 24)
        self.left = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))
        self.right = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU())
        self.out = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        left = self.shared(self.left(x))
        right = self.right(left)
        return self.out(torch.tanh(left)) + self.out(F.gelu(self.shared(right)).softmax(-1))


class Following(nn.Module):
    """Buffers that forward updates: an average of the batch that the loss needs, and others that
    nothing reads, of which one counts in whole numbers."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        self.batch = batch
        self.up, self.mid = nn.Linear(WIDTH, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, CLASSES)
        self.register_buffer("mean", torch.zeros(24))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        self.steps += 1
        self.last.fill_(2.5)
        x = self.mid(x - self.mean)
        self.seen.add_(1)
        if self.batch:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.head(torch.tanh(x))


class Counting(nn.Module):
    """Batch-norms in every part, of which one is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.mid, self.second = nn.Conv2d(WIDTH, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.tail, self.third = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=False)
        self.head, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.stem(x)))
        x = torch.relu(self.second(self.mid(x)))
        x = torch.relu(self.third(self.tail(x))).mean((2, 3))
        return self.out(torch.relu(self.last(self.head(x))))


class Between(nn.Module):
    """A buffer that one part changes and another one uses, earlier or later."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.up, self.mid = nn.Linear(WIDTH, 12), nn.Linear(12, 12)
        self.head, self.late = nn.Linear(12, CLASSES), late
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.scale.mul_(0.9)
        x = torch.tanh(self.up(x * self.scale if self.late else x))
        x = torch.tanh(self.mid(x))
        x = self.head(x if self.late else x * self.scale)
        if self.late:
            self.scale.mul_(0.9)
        return x


class Twice(nn.Module):
    """One batch-norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12)
        self.mid, self.head = nn.Linear(12, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.up(x)))
        return self.head(torch.relu(self.norm(self.mid(x))))


SHARED: dict[str, Model] = {
    "two_heads": Model(lambda: Heads(False), rows),
    "two_heads_deep": Model(lambda: Heads(True), rows),
    "recurring": Model(Recurring, tokens),
    "tied": Model(Tied, words),
    "returning": Model(Returning, rows),
    "outputs": Model(Outputs, rows),
    "following": Model(lambda: Following(True), rows, per_microbatch=True),
    "following_steps": Model(lambda: Following(False), rows, per_microbatch=True),
    "changed_early": Model(lambda: Between(False), rows, per_microbatch=True),
    "changed_late": Model(lambda: Between(True), rows, per_microbatch=True),
    "norm_twice": Model(Twice, rows, per_microbatch=True),
    "counting": Model(Counting, images, per_microbatch=True),
}
