"""The models of `layouts`: linears around one op or module that is seldom tried."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]
WIDTH, TOKENS, CLASSES, WORDS = 12, 6, 6, 14


@dataclass(frozen=True)
class Model:
    """A module in float64, how a batch for it is drawn, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[..., Tensor] = F.cross_entropy
    per_microbatch: bool = False
    """Its statistics are those of a micro-batch, by contract."""
    drawn: bool = False
    """It draws random numbers: compared is what it does under the plan for one process."""

    def made(self) -> nn.Module:
        """The module, always with the same values."""
        torch.manual_seed(3)
        return self.make().double()


def rows(size: int, generator: torch.Generator) -> Batch:
    """Vectors and their classes."""
    x = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def tokens(size: int, generator: torch.Generator) -> Batch:
    """Sequences of vectors and their classes."""
    x = torch.randn(size, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def images(size: int, generator: torch.Generator) -> Batch:
    """Pictures of three channels and their classes."""
    x = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def words(size: int, generator: torch.Generator) -> Batch:
    """Words, of which some come often, and classes."""
    drawn = torch.rand(size, TOKENS, generator=generator).square() * WORDS
    return drawn.long(), torch.randint(CLASSES, (size,), generator=generator)


class Around(nn.Module):
    """[samples, tokens, width]: a linear, the op, and linears to classes of each sample."""

    def __init__(self, op: Callable[[Tensor], Tensor], after: int, hidden: int = 24) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.op = op
        self.mid = nn.Linear(after, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.op(self.up(x))
        x = torch.tanh(self.mid(x))
        return self.head(x.flatten(1, -2).mean(1) if x.ndim > 2 else x)


def around(op: Callable[[Tensor], Tensor], hidden: int = 24, batch: Any = tokens) -> Model:
    """A model around a function of [samples, tokens, hidden], which may change the last dim."""
    lead = (8, TOKENS) if batch is tokens else (8,)

    def make() -> nn.Module:
        after = op(torch.rand(*lead, hidden, dtype=torch.float64)).shape[-1]
        return Around(op, after, hidden)

    return Model(make, batch)


class Words(nn.Module):
    """An embedding and linears behind it."""

    def __init__(self, table: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table = table()
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = torch.tanh(self.mid(x))
        return self.head(x.mean(1) if x.ndim > 2 else x)


def embedded(**given: Any) -> Model:
    """A model over an embedding with these arguments."""
    return Model(lambda: Words(lambda: nn.Embedding(WORDS, WIDTH, **given)), words)


def bagged(**given: Any) -> Model:
    """A model over bags of words."""
    return Model(lambda: Words(lambda: nn.EmbeddingBag(WORDS, WIDTH, **given)), words)


class Pictures(nn.Module):
    """Convolutions around a module of images [samples, 12, 8, 8]."""

    def __init__(self, op: Callable[[], nn.Module | Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.op = op()
        made = self.op(torch.rand(2, WIDTH, 8, 8))
        self.mid = nn.Conv2d(made.shape[1], WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.op(torch.tanh(self.stem(x)))
        x = torch.tanh(self.mid(x))
        return self.head(x.mean((2, 3)))


def pictured(op: Callable[[], Any], **more: Any) -> Model:
    """A model around a module of images."""
    return Model(lambda: Pictures(op), images, **more)


class Fourier(nn.Module):
    """A Fourier layer whose weights are pairs of reals, between linears."""

    def __init__(self, norm: str | None = "ortho") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, 8, 5, 2) * 0.3)
        self.mid = nn.Conv2d(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        made = torch.fft.rfft2(x, norm=self.norm) * torch.view_as_complex(self.weight)
        x = torch.fft.irfft2(made, s=(8, 8), norm=self.norm)
        x = torch.tanh(self.mid(x))
        return self.head(x.mean((2, 3)))


class Mixing(nn.Module):
    """Channels mixed in the frequencies by an einsum of complex numbers, as neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 4, 3, 2) * 0.3)
        self.skip = nn.Conv2d(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        seen = torch.fft.rfft2(x)
        kept = torch.einsum(
            "bixy,ioxy->boxy", seen[:, :, :4, :3], torch.view_as_complex(self.weight)
        )
        kept = F.pad(kept, (0, 2, 0, 4))
        x = torch.tanh(torch.fft.irfft2(kept, s=(8, 8)) + self.skip(x))
        return self.head(x.mean((2, 3)))


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)


def _square(x: Tensor) -> Tensor:
    return x @ x.mT / 8 + 2 * torch.eye(x.shape[-2], dtype=x.dtype)


def _fourier_models() -> dict[str, Model]:
    mixed = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    return {
        "fourier": Model(Fourier, images),
        "fourier_backward": Model(lambda: Fourier(None), images),
        "fourier_mixing": Model(Mixing, images),
        "fft_real": around(lambda x: torch.fft.fft(x).real),
        "fft_tokens": around(lambda x: torch.fft.fft2(x, dim=(-2, -1)).real),
        "rfft_abs": around(lambda x: torch.fft.rfft(x, dim=1).abs()),
        "irfft": around(lambda x: torch.fft.irfft(_complex(x), n=9)),
        "hfft": around(lambda x: torch.fft.hfft(_complex(x), n=9)),
        "fftshift": around(lambda x: torch.fft.fftshift(torch.fft.fft(x, dim=1)).imag),
        "complex_mul": around(lambda x: _real(_complex(x) * _complex(x).conj() + _complex(x))),
        "complex_mm": around(lambda x: _real(_complex(x) @ _complex(x).mT @ _complex(x))),
        "complex_mixed": around(lambda x: (_complex(x.repeat(1, 1, 2)[..., :16]) @ mixed.to(
            torch.complex128)).imag),
        "complex_abs": around(lambda x: _complex(x).abs()),
        "complex_angle": around(lambda x: torch.angle(_complex(x))),
        "polar": around(lambda x: torch.polar(x.sigmoid(), x).imag),
        "complex_exp": around(lambda x: torch.exp(1j * x).real),
        "complex_stack": around(lambda x: _real(torch.complex(x, x.tanh()))),
        "stft": around(lambda x: torch.stft(
            x.flatten(1), 16, window=torch.hann_window(16).double(), return_complex=True
        ).abs().mT),
        "rotary_complex": around(lambda x: _real(_complex(x) * torch.polar(
            torch.ones(TOKENS, 1).double(), torch.arange(TOKENS).double().unsqueeze(1)))),
    }  # fmt: skip


def _order_models() -> dict[str, Model]:
    """Scans, ranks and what needs an order of the values."""
    return {
        "cumsum": around(lambda x: x.cumsum(-1) / 8 + x.cumsum(1) / 4),
        "cumprod": around(lambda x: x.sigmoid().cumprod(-1)),
        "cummax": around(lambda x: x.cummax(-1).values),
        "logcumsumexp": around(lambda x: x.logcumsumexp(1)),
        "sort": around(lambda x: x.sort(-1).values * torch.arange(24)),
        "topk": around(lambda x: x.topk(5, -1).values),
        "kthvalue": around(lambda x: x.kthvalue(3, 1, keepdim=True).values + x),
        "median": around(lambda x: x.median(-1, keepdim=True).values + x.tanh()),
        "quantile": around(lambda x: x.quantile(0.3, -1, keepdim=True) * x),
        "mode": around(lambda x: x.round().mode(-1, keepdim=True).values + x),
        "searchsorted": around(lambda x: torch.bucketize(
            x, torch.tensor([-1.0, 0.0, 1.0]).double()) * x),
        "trapezoid": around(lambda x: torch.cumulative_trapezoid(x, dim=-1)),
        "diff": around(lambda x: x.diff(dim=-1)),
    }  # fmt: skip


def _algebra_models() -> dict[str, Model]:
    """Linear algebra of small matrices."""
    return {
        "whitened": around(lambda x: torch.linalg.solve(_square(x), x)),
        "inverse": around(lambda x: torch.linalg.inv(_square(x)) @ x),
        "cholesky": around(lambda x: torch.linalg.cholesky(_square(x)) @ x),
        "singular": around(lambda x: torch.linalg.svdvals(x).unsqueeze(-1) * x),
        "triangular": around(lambda x: torch.linalg.solve_triangular(
            _square(x).tril(), x, upper=False)),
        "determinant": around(lambda x: torch.linalg.slogdet(_square(x))[1].view(-1, 1, 1) * x),
        "eigh": around(lambda x: torch.linalg.eigvalsh(_square(x)).unsqueeze(-1) * x),
        "matrix_exp": around(lambda x: torch.matrix_exp(_square(x) / 20) @ x),
        "pinv": around(lambda x: torch.linalg.pinv(_square(x)) @ x),
        "qr": around(lambda x: torch.linalg.qr(_square(x))[0] @ x),
        "logdet_scalar": around(lambda x: x * torch.logdet(_square(x)).view(-1, 1, 1)),
        "cross": around(lambda x: torch.linalg.cross(x[..., :3], x[..., 3:6])),
        "vander": around(lambda x: torch.linalg.vander(x[..., 0].tanh(), N=5)),
    }  # fmt: skip


def _sample_models() -> dict[str, Model]:
    """Samples that depend on each other."""
    return {
        "across_samples": around(lambda x: x - x.mean(0, keepdim=True)),
        "sample_pairs": around(lambda x: torch.softmax(x @ x.T, -1) @ x, batch=rows),
        "roll_samples": around(lambda x: x + x.roll(1, 0)),
        "flip_samples": around(lambda x: x + x.flip(0), batch=rows),
        "sorted_samples": around(lambda x: x.sort(0).values, batch=rows),
        "cumsum_samples": around(lambda x: x.cumsum(0), batch=rows),
    }  # fmt: skip


def _move_models() -> dict[str, Model]:
    """Values that are taken from elsewhere, repeated, padded or joined."""
    order = torch.tensor([3, 1, 2, 0, 5, 4])
    return {
        "roll": around(lambda x: x.roll(5, -1) + x.roll((1, 2), (1, 2))),
        "flip": around(lambda x: x.flip(-1) + x.flip(1)),
        "gather": around(lambda x: x.gather(1, order.view(1, 6, 1).expand(x.shape[0], 6, 24))),
        "take_along": around(lambda x: torch.take_along_dim(x, x.argsort(-1), -1).tanh()),
        "index_add": around(lambda x: torch.zeros_like(x).index_add(1, order % 3, x)),
        "scatter_add": around(lambda x: torch.zeros_like(x).scatter_add(
            2, (torch.arange(24) // 2).expand_as(x), x)),
        "index_select": around(lambda x: x.index_select(-1, order)),
        "unfold": around(lambda x: x.unfold(-1, 6, 3).flatten(2)),
        "diag": around(lambda x: torch.diag_embed(x).sum(-1).tril()),
        "masked_fill": around(lambda x: x.masked_fill(x > 1, -0.5) + x.masked_fill(x < 0, 0)),
        "where": around(lambda x: torch.where(x > 0, x, x.sum(-1, keepdim=True))),
        "repeat": around(lambda x: x.repeat_interleave(2, 1).repeat(1, 1, 2)),
        "swap": around(lambda x: x.unflatten(-1, (4, 6)).movedim(-1, 1).flatten(2)),
        "chunked": around(lambda x: torch.cat(
            [p * (i + 1) for i, p in enumerate(x.chunk(5, -1))], -1)),
        "tensor_split": around(lambda x: torch.cat(x.tensor_split(3, -1)[::-1], -1)),
        "hsplit": around(lambda x: torch.stack(x.unbind(-1)[:4], -1)),
        "pad_reflect": around(lambda x: F.pad(x, (2, 3), mode="reflect")),
        "pad_circular": around(lambda x: F.pad(x, (2, 3), mode="circular")),
    }  # fmt: skip


def _value_models() -> dict[str, Model]:
    """Functions of each value, sums and norms."""
    return {
        "outer": around(lambda x: torch.einsum(
            "bti,btj->btij", x[..., :4], x[..., 4:7]).flatten(2)),
        "einsum_ellipsis": around(lambda x: torch.einsum("...ij,...kj->...ik", x, x)),
        "einsum_repeated": around(lambda x: torch.einsum("bii->bi", x[..., :6]).unsqueeze(-1) * x),
        "einsum_summed": around(lambda x: torch.einsum(
            "bij,bkj,l->bil", x, x, x[0, 0, :5] * 0 + 1)),
        "kron": around(lambda x: torch.kron(x[..., :3], torch.ones(1, 4).double())),
        "tensordot": around(lambda x: torch.tensordot(x, x[0, :, :24].T.detach() * 0 + 1, 1)),
        "cdist": around(lambda x: torch.cdist(x, x.roll(1, 1))),
        "cosine": around(lambda x: F.cosine_similarity(x, x.roll(1, 1), dim=-1).unsqueeze(-1) * x),
        "normalize": around(lambda x: F.normalize(x, dim=-1) + F.normalize(x, dim=1)),
        "norm_3": around(lambda x: x / x.norm(3, dim=-1, keepdim=True)),
        "max_norm": around(lambda x: x / x.norm(math.inf, dim=1, keepdim=True)),
        "std": around(lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)),
        "var_mean": around(lambda x: torch.var_mean(x, (1, 2), keepdim=True)[0] * x),
        "prod": around(lambda x: x.sigmoid().prod(1, keepdim=True) + x),
        "renorm": around(lambda x: torch.renorm(x.tanh(), 2, 1, 0.5)),
        "glu": around(lambda x: F.glu(x, -1) + F.glu(x, 1).repeat(1, 2, 1)[..., :12]),
        "softmin": around(lambda x: F.softmin(x, 1) + F.gumbel_softmax(x, hard=False) * 0),
        "prelu": around(lambda x: F.prelu(x, torch.tensor([0.2]).double())),
        "special": around(lambda x: torch.special.i0e(x) + torch.special.erfcx(
            x) + torch.special.entr(x.sigmoid()) + torch.special.log_ndtr(
            x) + torch.special.xlog1py(x, x.exp())),
        "lgamma": around(lambda x: torch.lgamma(x.exp()) + torch.digamma(
            x.exp() + 1) + torch.sinc(x)),
        "hypot": around(lambda x: torch.hypot(x, x.roll(1, -1)) + torch.ldexp(x, torch.tensor(1))),
        "addcmul": around(lambda x: torch.addcmul(x, x, x.tanh(), value=0.3)),
        "lerp": around(lambda x: torch.lerp(x, x.mean(-1, keepdim=True), 0.3)),
    }  # fmt: skip


OPS: dict[str, Model] = (
    _fourier_models() | _move_models() | _order_models() | _value_models() | _algebra_models()
    | _sample_models()
)  # fmt: skip
