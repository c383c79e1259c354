"""Small models of pictures: convolutions with norms, skips, and pictures as results."""

import torch
from torch import Tensor, nn

F = nn.functional


def pictures(samples: int = 8, *, channels_last: bool = False) -> tuple[Tensor, Tensor]:
    """Pictures of 32 by 32, and their classes of 10."""
    data = torch.randn(samples, 3, 32, 32)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return data.to(memory_format=layout), torch.randint(0, 10, (samples,))


class Residual(nn.Module):
    """Convolutions with batch norms that are added to what they read."""

    def __init__(self, width: int = 32, *, channels_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return F.cross_entropy(self.head(F.max_pool2d(x, 2).mean((2, 3))), classes)


class UNet(nn.Module):
    """What the first layer makes is put beside what the last but one reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 32, 3, 2, 1)
        self.inner, self.up = nn.Conv2d(32, 32, 3, padding=1), nn.ConvTranspose2d(32, width, 2, 2)
        self.both, self.out = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        first = F.gelu(self.into(x))
        inner = F.gelu(self.inner(F.gelu(self.down(first))))
        both = torch.cat([self.up(inner), first], 1)
        return F.mse_loss(self.out(F.gelu(self.both(both))), x)


class Inverted(nn.Module):
    """Narrow values, and wide ones between them, with gates by their means; each module is a block,
    so that values skip some."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        wide = 4 * width
        self.stem, self.head = nn.Conv2d(3, width, 3, stride=2, padding=1), nn.Linear(width, 10)
        self.ups, self.gates = (
            nn.ModuleList(nn.Conv2d(width, wide, 1) for _ in range(2)) for _ in range(2)
        )
        self.apart = nn.ModuleList(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide) for _ in range(2)
        )
        self.few, self.downs = (
            nn.ModuleList(nn.Conv2d(wide, width, 1) for _ in range(2)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, wide) for _ in range(2))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(2):
            wide = F.silu(self.norms[i](self.apart[i](F.silu(self.ups[i](x)))))
            gates = self.gates[i](F.silu(self.few[i](wide.mean((2, 3), keepdim=True))))
            x = x + self.downs[i](wide * gates.sigmoid())
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), classes)


class Pyramid(nn.Module):
    """Pictures of several sizes that are made as large as the first, and put side by side."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.second, self.third = (nn.Conv2d(width, width, 3, 2, 1) for _ in range(2))
        self.large, self.middle, self.small = (nn.Conv2d(width, width, 1) for _ in range(3))
        self.out = nn.Conv2d(3 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        first = F.relu(self.first(x))
        second = F.relu(self.second(first))
        third = self.small(F.relu(self.third(second)))
        second = self.middle(second) + F.interpolate(third, scale_factor=2.0)
        first = self.large(first) + F.interpolate(second, scale_factor=2.0)
        larger = F.interpolate(second, scale_factor=2.0, mode="bilinear")
        both = torch.cat([first, larger, F.interpolate(third, scale_factor=4.0)], 1)
        return F.mse_loss(self.out(both), x)


class Growing(nn.Module):
    """Each layer reads what all before have made (DenseNet)."""

    def __init__(self, more: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * more, 3, padding=1, bias=False)
        widths = [(2 + i) * more for i in range(4)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Conv2d(width, more, 3, padding=1) for width in widths)
        self.head = nn.Linear(6 * more, 10)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return F.cross_entropy(self.head(F.avg_pool2d(x, 32).flatten(1)), classes)


class Scaled(nn.Module):
    """Convolutions by channel and wide layers, scaled by a parameter that autocast leaves wide, so
    that all after the first reads wide values (ConvNeXt)."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 4, stride=4), nn.LayerNorm(width)
        self.apart = nn.ModuleList(
            nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(3))
        self.scales = nn.ParameterList(torch.full((width,), 0.01) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for apart, norm, wide, narrow, scale in zip(
            self.apart, self.norms, self.wide, self.narrow, self.scales, strict=True
        ):
            y = narrow(F.gelu(wide(norm(apart(x).permute(0, 2, 3, 1))))) * scale
            x = x + y.permute(0, 3, 1, 2)
        return F.cross_entropy(self.head(x.mean((-2, -1))), classes)
