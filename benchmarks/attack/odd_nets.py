"""Odd models: each is a small net that uses one thing that tracing may get wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


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


class OnInput(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.clone().mul_(2), y)


class OnGivenInput(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x *= 2
        return super().forward(x, y)


def written_views(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, :4] *= 2
    h.t()[4:].add_(1)
    h.view(-1)[::3] = 0
    h.diagonal().mul_(3)
    return torch.tanh(h)


def masked_writes(h: Tensor) -> Tensor:
    h = h.clone()
    h.masked_fill_(h > 1, 1.0)
    h[h < -1] = -1.0
    h[torch.tensor([0, 2]), 1] = 0.5
    h.scatter_(1, torch.zeros(8, 1, dtype=torch.int64), 0.5)
    return h.index_add(0, torch.tensor([0, 2]), h[:2])


class Fourier(Net):
    def between(self, h: Tensor) -> Tensor:
        z = torch.fft.rfft(h)
        return torch.fft.irfft(z * z.abs(), n=8)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 4, dtype=torch.complex128) * 0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x.to(torch.complex128) @ self.w).abs(), y)


class ComplexSpectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 4).double()
        self.w = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.fft.rfft(self.a(x))
        z = torch.cat([z[:, :3] * self.w[:3], z[:, 3:]], 1)
        out = torch.zeros_like(z)
        out[:, :4] = z[:, :4]
        return F.cross_entropy(self.b(torch.fft.irfft(out, n=8)), y)


class ComplexBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "turn", torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128)
        )

    def between(self, h: Tensor) -> Tensor:
        z = torch.view_as_complex(h.reshape(8, 4, 2)) * self.turn
        return torch.view_as_real(z).flatten(1)


class Packed(nn.Module):
    """Weights of four bits, packed by two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 4).double()
        self.register_buffer("q", torch.randint(0, 256, (8, 4), dtype=torch.uint8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        low, high = self.q & 15, self.q >> 4
        w = torch.stack([low, high], -1).flatten(1).double() / 8 - 1
        z = F.linear(torch.tanh(self.a(x)), w) + ((self.q << 2) ^ 3).double().sum() * 0
        return F.cross_entropy(self.b(z), y)


class PackedSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True).double()
        self.b = nn.Linear(8, 4).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = torch.arange(len(x), 0, -1).clamp(max=3)
        packed = pack_padded_sequence(x[:, None].expand(-1, 3, -1), lengths, batch_first=True)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.cross_entropy(self.b(h.sum(1)), y)


class GivenLengths(PackedSequence):
    def forward(self, x: Tensor, y: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            x[:, None].expand(-1, 3, -1), n, batch_first=True, enforce_sorted=False
        )
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return F.cross_entropy(self.b(h.sum(1)), y)


class Sequence(nn.Module):
    """A recurrent layer over three steps."""

    def __init__(self, kind: type[nn.Module], **kwargs: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 8, batch_first=True, **kwargs).double()
        self.b = nn.Linear(16 if kwargs.get("bidirectional") else 8, 4).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.rnn(torch.stack([x, x * 2, x + 1], 1))[0]
        return F.cross_entropy(self.b(h[:, -1]), y)


class Sparse(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.e = nn.Embedding(16, 8, **kwargs).double()
        self.b = nn.Linear(8, 4).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ids = (x.abs() * 4).long().clamp(max=15)
        return F.cross_entropy(self.b(self.e(ids).mean(1)), y)


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


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.requires_grad_(False)


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.requires_grad_(True)
        return super().forward(x, y)


class FrozenInside(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return super().forward(x, y)


class ByData(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.a.weight.data.sum()


class DataWritten(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.data.mul_(0.9)
        return super().forward(x, y)


class DataAssigned(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.data = self.a.weight.data * 0.9
        return super().forward(x, y)


class Updated(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.copy_(self.a.weight / self.a.weight.norm())
        return super().forward(x, y)


class Averaged(Net):
    """A teacher in buffers that follows the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", self.a.weight.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.9).add_(self.a.weight, alpha=0.1)
        target = F.linear(x, self.w)
        return super().forward(x, y) + (self.a(x) - target).pow(2).mean()


def detached(h: Tensor) -> Tensor:
    z = h * 2
    z.detach_()
    return h + z


def by_data(h: Tensor) -> Tensor:
    z = h.clone()
    z.data.mul_(2)
    return z + h.data


class Autocast(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tanh(h)


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 8).to(torch.bfloat16)

    def between(self, h: Tensor) -> Tensor:
        return h + self.low(h.to(torch.bfloat16)).double()


class KeywordOnly(Net):
    def forward(self, *, x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(x * scale, y)


class Star(Net):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(args[0], args[1])


class Given(NamedTuple):
    loss: Tensor
    more: int


class Returns(Net):
    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.made(super().forward(x, y))


class Scaled(Net):
    """Takes a scalar input beside the batch."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x * scale, y)


class Optional_(Net):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask, y)


class Nested(Net):
    def between(self, h: Tensor) -> Tensor:
        parts = torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 3, 8]))
        return torch.tanh(parts).values()


class SparseProduct(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(8).double().to_sparse())

    def between(self, h: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, h)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.DataParallel(Net())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x=x, y=y)  # type: ignore[no-any-return]


class PlainAttribute(Net):
    def __init__(self) -> None:
        super().__init__()
        self.past = torch.zeros(8).double()

    def between(self, h: Tensor) -> Tensor:
        h = h + self.past
        self.past.copy_(h.detach().mean(0))
        return torch.tanh(h)


class GrownBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 8).double())

    def between(self, h: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, h.detach()[:1]])
        return torch.tanh(h) + self.seen.sum(0)


class Normed(Net):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = kind().double()

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(h))


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


class Evaluated(Net):
    """Part of it stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double().eval()

    def train(self, mode: bool = True) -> "Evaluated":
        super().train(mode)
        self.norm.eval()
        return self

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(h))


class NoGrad(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h * 2
        with torch.no_grad():
            h.clamp_(-1, 1)
        return h


def through_detach(h: Tensor) -> Tensor:
    z = h * 2
    z.detach().mul_(3)
    return z


class BitsInPlace(Packed):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.q.clone()
        q >>= 1
        q <<= 1
        q &= 14
        q |= 1
        q ^= 2
        return F.cross_entropy(self.b(F.linear(self.a(x), q.double().repeat(1, 2) / 16)), y)


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
