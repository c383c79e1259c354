"""Odd models: each is a small net that uses one thing that tracing may get wrong. Here: how its
forward is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Two linears; `inside` is what happens between them."""

    def __init__(self, inside: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 4).double()
        self.inside = inside

    def between(self, h: Tensor) -> Tensor:
        """The hidden values, changed."""
        return self.inside(h) if self.inside else torch.tanh(h)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.b(self.between(self.a(x))), y)


def net(inside: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Builds the net with `inside` between its linears."""
    return lambda: Net(inside)


class Vmapped(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(row) * row.sum())(h)


class Cond(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))


class Loop(Net):
    def between(self, h: Tensor) -> Tensor:
        count = torch.zeros((), dtype=torch.int64)
        more = lambda i, z: i < 3  # noqa: E731
        step = lambda i, z: (i + 1, z * 0.9)  # noqa: E731
        return torch._higher_order_ops.while_loop(more, step, (count, h))[1]


class Penalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = super().forward(x, y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.pow(2).sum()


class InnerGrad(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        (grad,) = torch.autograd.grad(loss, self.b.weight, retain_graph=True)
        return loss + 0.1 * (grad * self.b.weight).sum()


class FuncGrad(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        grad = torch.func.grad(lambda z: torch.tanh(self.a(z)).sum())(x)
        return super().forward(x + grad, y)


class Functional(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: p * 1.1 for name, p in self.a.named_parameters()}
        h = torch.func.functional_call(self.a, weights, (x,))
        return F.cross_entropy(self.b(torch.tanh(h)), y)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList(torch.randn(8, 8).double() * 0.3 for _ in range(3))
        self.named = nn.ParameterDict(
            {"end": torch.randn(8, 4).double(), "b": torch.zeros(4).double()}
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for w in self.ws:
            x = torch.tanh(x @ w)
        return F.cross_entropy(x @ self.named["end"] + self.named["b"], y)


class Twice(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.a(torch.tanh(h)))


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([self.a, self.a])

    def between(self, h: Tensor) -> Tensor:
        for layer in self.more:
            h = torch.tanh(layer(h))
        return h


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.jit.script(self.a)


class JitTraced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.jit.trace(self.a, torch.zeros(8, 8).double())


class ScriptedFunction(Net):
    def between(self, h: Tensor) -> Tensor:
        return _scripted(h)


@torch.jit.script
def _scripted(h: Tensor) -> Tensor:
    return torch.tanh(h) * 2


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.compile(self.a, backend="eager")


class CompiledFunction(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.compile(lambda z: torch.tanh(z) * 2, backend="eager")(h)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.DataParallel(Net())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x=x, y=y)  # type: ignore[no-any-return]


class Ours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        return h.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-1, 1), None


class WithEffect(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def between(self, h: Tensor) -> Tensor:
        return Ours.apply(h, self.seen)  # type: ignore[no-any-return, no-untyped-call]


class Backward(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        (loss * 0.5).backward(retain_graph=True)
        return loss


class Dynamo(Net):
    @torch._dynamo.disable
    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


class Unfolded(Net):
    def between(self, h: Tensor) -> Tensor:
        z = F.unfold(h.reshape(8, 1, 2, 4), (2, 2)).flatten(1)
        return F.pad(z, (0, 8))[:, :8] + h.unfold(1, 3, 1).sum(-1).repeat(1, 2)[:, :8]
