"""Odd models of values that are not plain numbers: complex, packed, sparse, nested, of several
dtypes or lengths."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.attack.odd_nets import Net


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


class BitsInPlace(Packed):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.q.clone()
        q >>= 1
        q <<= 1
        q &= 14
        q |= 1
        q ^= 2
        return F.cross_entropy(self.b(F.linear(self.a(x), q.double().repeat(1, 2) / 16)), y)


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
