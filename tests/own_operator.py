"""A model with a user's own operator, which no rule knows."""

import torch
from torch import Tensor, nn

CLASSES = 8


@torch.library.custom_op("zootest::spread", mutates_args=())
def spread(x: Tensor, scale: Tensor) -> Tensor:
    """x[b, s, c] less its mean over s, times tanh(scale[c])."""
    return (x - x.mean(1, keepdim=True)) * torch.tanh(scale)


@spread.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors  # type: ignore[attr-defined]
    factor = torch.tanh(scale)
    middle = grad * factor
    by_scale = (grad * (x - x.mean(1, keepdim=True))).sum((0, 1)) * (1 - factor**2)
    return middle - middle.mean(1, keepdim=True), by_scale


spread.register_autograd(_backward, setup_context=_save)


class WithOwnOperator(nn.Module):
    """Linear layers around the operator."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.scale = nn.ParameterList(torch.randn(2 * width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for into, back, scale in zip(self.into, self.back, self.scale, strict=True):
            x = x + back(spread(into(x), scale))
        return self.head(x.square().mean(1))  # type: ignore[no-any-return]


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples and their labels."""
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return torch.randn(size, 6, 32, generator=generator), labels
