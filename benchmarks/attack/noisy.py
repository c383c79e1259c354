"""Models of `layouts` that draw random numbers: each must draw the same under every layout."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Dirichlet, Gamma, Normal, Uniform
from torch.nn import functional as F

from benchmarks.attack.odd_ops import (
    CLASSES,
    WIDTH,
    Around,
    Model,
    pictured,
    rows,
    tokens,
)


class Autoencoder(nn.Module):
    """A variational one: the code is a mean and noise that is scaled."""

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.mean = nn.Linear(WIDTH, 24), nn.Linear(24, 8)
        self.spread, self.down = nn.Linear(24, 8), nn.Linear(8, WIDTH)
        self.draw = draw

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.up(x))
        mean, spread = self.mean(h), self.spread(h)
        code = self.draw(mean, torch.exp(0.5 * spread))
        lost = F.mse_loss(self.down(code), x)
        return {"loss": lost - 0.01 * (1 + spread - mean.square() - spread.exp()).mean()}


class Masked(nn.Module):
    """Words are hidden at random in forward, and the mean is over those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = torch.rand(x.shape[:2], device=x.device) < 0.4
        seen = self.down(torch.tanh(self.up(x.masked_fill(hidden.unsqueeze(-1), 0.0))))
        wanted = y.unsqueeze(1).expand(-1, x.shape[1]).masked_fill(~hidden, -100)
        return {"loss": F.cross_entropy(seen.flatten(0, 1), wanted.flatten())}


def _named(batch: Callable[[int, torch.Generator], tuple[Tensor, ...]]):  # type: ignore[no-untyped-def]
    def draw(size: int, generator: torch.Generator) -> dict[str, Tensor]:
        x, y = batch(size, generator)
        return {"x": x, "y": y}

    return draw


def _around(op: Callable[[Tensor], Tensor], after: int = 24) -> Model:
    return Model(lambda: Around(op, after), tokens, drawn=True)


def _autoencoder(draw: Callable[[Tensor, Tensor], Tensor]) -> Model:
    return Model(
        lambda: Autoencoder(draw), _named(rows), None, drawn=True  # type: ignore[arg-type]
    )  # fmt: skip


def _attended(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (4, 6)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).flatten(2)


NOISY: dict[str, Model] = {
    "vae": _autoencoder(lambda mean, std: mean + torch.randn_like(std) * std),
    "vae_size": _autoencoder(lambda mean, std: mean + torch.randn(mean.shape) * std),
    "vae_normal": _autoencoder(lambda mean, std: torch.normal(mean.detach(), std.detach()) + mean),
    "vae_rsample": _autoencoder(
        lambda mean, std: Normal(mean, std, validate_args=False).rsample()),
    "vae_uniform": _autoencoder(
        lambda mean, std: Uniform(mean, mean + std, validate_args=False).rsample()),
    "vae_dirichlet": _autoencoder(
        lambda mean, std: mean * Dirichlet(mean.detach().exp(), validate_args=False).sample()),
    "vae_dirichlet_gradient": _autoencoder(
        lambda mean, std: Dirichlet(mean.exp(), validate_args=False).rsample()),
    "vae_gamma": _autoencoder(
        lambda mean, std: Gamma(mean.exp(), std, validate_args=False).rsample()),
    "vae_codes": _autoencoder(lambda mean, std: F.gumbel_softmax(mean, tau=0.7, hard=True)),
    "masked": Model(Masked, _named(tokens), None, drawn=True),  # type: ignore[arg-type]
    "rand": _around(lambda x: x + torch.rand_like(x)),
    "rand_flat": _around(lambda x: (x.flatten(0, 1) + torch.rand_like(x.flatten(0, 1))).view_as(x)),
    "rand_turned": _around(lambda x: (x.mT + torch.rand_like(x.mT)).mT),
    "rand_shared": _around(lambda x: x * torch.rand(24)),
    "rand_rows": _around(lambda x: x * torch.rand(x.shape[0], 1, 1)),
    "randint": _around(lambda x: x * torch.randint(1, 4, x.shape)),
    "randperm": _around(lambda x: x[:, :, torch.randperm(24)]),
    "bernoulli": _around(lambda x: x * torch.bernoulli(x.sigmoid())),
    "stochastic_depth": _around(
        lambda x: x + x.tanh() * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)),
    "exponential": _around(lambda x: x * torch.empty_like(x).exponential_()),
    "cauchy": _around(lambda x: x * torch.empty_like(x).cauchy_().clamp(-1, 1)),
    "geometric": _around(lambda x: x / torch.empty_like(x).geometric_(0.5)),
    "log_normal": _around(lambda x: x * torch.empty_like(x).log_normal_(0.0, 0.2)),
    "poisson": _around(lambda x: x * torch.poisson(x.detach().exp().clamp(max=3))),
    "binomial": _around(lambda x: x * torch.binomial(
        torch.full_like(x, 3.0), x.detach().sigmoid())),
    "multinomial": _around(lambda x: x * torch.multinomial(x.mean(1).softmax(-1), 1).unsqueeze(1)),
    "categorical": _around(lambda x: x * Categorical(
        logits=x, validate_args=False).sample().unsqueeze(-1)),
    "bernoulli_logits": _around(lambda x: x * Bernoulli(
        logits=x, validate_args=False).sample()),
    "rrelu": _around(lambda x: F.rrelu(x, training=True)),
    "dropout": _around(lambda x: F.dropout(x, 0.3)),
    "alpha_dropout": _around(lambda x: F.alpha_dropout(x, 0.3, training=True)),
    "dropout_1d": _around(lambda x: F.dropout1d(x, 0.3)),
    "dropout_2d": pictured(lambda: nn.Dropout2d(0.3), drawn=True),
    "feature_alpha": pictured(lambda: nn.FeatureAlphaDropout(0.3), drawn=True),
    "dropout_3d": _around(lambda x: F.dropout3d(
        x.unflatten(-1, (4, 3, 2)).transpose(1, 2), 0.3).transpose(1, 2).flatten(2)),
    "fractional_pool": pictured(
        lambda: nn.FractionalMaxPool2d(2, output_ratio=0.6), drawn=True),
    "attention": _around(_attended),
}  # fmt: skip
