"""Models of `layouts` around a module or a loss that is seldom tried."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attack.odd_ops import (
    CLASSES,
    TOKENS,
    WIDTH,
    WORDS,
    Around,
    Model,
    bagged,
    embedded,
    pictured,
    rows,
    tokens,
    words,
)


def _image_models() -> dict[str, Model]:
    def pool_back() -> Callable[[Tensor], Tensor]:
        def op(x: Tensor) -> Tensor:
            made, where = F.max_pool2d(x, 2, return_indices=True)
            return F.max_unpool2d(made, where, 2)

        return op

    def sampled() -> Callable[[Tensor], Tensor]:
        def op(x: Tensor) -> Tensor:
            grid = torch.tanh(x[:, :2].permute(0, 2, 3, 1))
            return F.grid_sample(x, grid, align_corners=False)

        return op

    def affine() -> Callable[[Tensor], Tensor]:
        def op(x: Tensor) -> Tensor:
            theta = x.mean((2, 3))[:, :6].view(-1, 2, 3)
            return F.grid_sample(x, F.affine_grid(theta, list(x.shape)), align_corners=True)

        return op

    return {
        "conv_transpose": pictured(lambda: nn.ConvTranspose2d(WIDTH, 8, 3, 2, 1, 1)),
        "conv_transpose_groups": pictured(lambda: nn.ConvTranspose2d(WIDTH, 8, 3, groups=4)),
        "conv_dilated": pictured(lambda: nn.Conv2d(WIDTH, 16, 3, dilation=2, padding=2, groups=4)),
        "conv_depthwise": pictured(lambda: nn.Conv2d(WIDTH, 24, 3, padding=1, groups=WIDTH)),
        "conv_groups_3": pictured(lambda: nn.Conv2d(WIDTH, 6, 3, stride=2, groups=3)),
        "conv_same": pictured(lambda: nn.Conv2d(WIDTH, 8, (2, 3), padding="same")),
        "conv_reflect": pictured(
            lambda: nn.Conv2d(WIDTH, 8, 3, padding=1, padding_mode="reflect")),
        "max_unpool": pictured(pool_back),
        "avg_pool": pictured(lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        "lp_pool": pictured(lambda: nn.LPPool2d(2, 2)),
        "adaptive_pool": pictured(lambda: nn.AdaptiveAvgPool2d((3, 5))),
        "adaptive_max": pictured(lambda: nn.AdaptiveMaxPool2d(3)),
        "pixel_shuffle": pictured(lambda: nn.PixelShuffle(2)),
        "pixel_unshuffle": pictured(lambda: nn.PixelUnshuffle(2)),
        "channel_shuffle": pictured(lambda: nn.ChannelShuffle(3)),
        "upsample": pictured(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
        "upsample_nearest": pictured(lambda: nn.Upsample(size=(5, 11))),
        "bicubic": pictured(lambda: nn.Upsample(scale_factor=1.5, mode="bicubic")),
        "unfold_fold": pictured(lambda: nn.Sequential(
            nn.Unfold(3, padding=1), nn.Fold((8, 8), 3, padding=1))),
        "local_norm": pictured(lambda: nn.LocalResponseNorm(5, alpha=0.5)),
        "group_norm": pictured(lambda: nn.GroupNorm(4, WIDTH)),
        "group_norm_1": pictured(lambda: nn.GroupNorm(1, WIDTH)),
        "instance_norm": pictured(lambda: nn.InstanceNorm2d(WIDTH, affine=True)),
        "instance_running": pictured(
            lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True),
            per_microbatch=True),
        "batch_norm": pictured(lambda: nn.BatchNorm2d(WIDTH), per_microbatch=True),
        "batch_norm_cumulative": pictured(
            lambda: nn.BatchNorm2d(WIDTH, momentum=None), per_microbatch=True),
        "batch_norm_plain": pictured(
            lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False), per_microbatch=True),
        "channel_softmax": pictured(lambda: nn.Softmax2d()),
        "grid_sample": pictured(sampled),
        "affine_grid": pictured(affine),
        "spectral_norm": pictured(
            lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(WIDTH, 8, 3)),
            per_microbatch=True),
        "weight_norm": pictured(lambda: nn.utils.parametrizations.weight_norm(
            nn.Conv2d(WIDTH, 8, 3))),
        "layer_scale": pictured(lambda: nn.Sequential(nn.Conv2d(WIDTH, 8, 1), nn.PReLU(8))),
    }  # fmt: skip


class Paired(nn.Module):
    """Two towers, and a loss over what they make of a batch."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.top, self.loss = nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        left = self.top(torch.tanh(self.left(x)))
        right = self.top(torch.tanh(self.right(x.flip(-1))))
        return {"loss": self.loss(left, right) + 0.1 * F.cross_entropy(left, y)}


def paired(loss: Callable[[Tensor, Tensor], Tensor]) -> Model:
    """A model whose loss is of two towers."""

    def named(size: int, generator: torch.Generator) -> Any:
        x, y = rows(size, generator)
        return {"x": x, "y": y}

    return Model(lambda: Paired(loss), named, None)  # type: ignore[arg-type]


def _infonce(left: Tensor, right: Tensor) -> Tensor:
    logits = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T / 0.2
    return F.cross_entropy(logits, torch.arange(logits.shape[0]))


def _classes(loss: Callable[[Tensor, Tensor], Tensor]) -> Model:
    return Model(lambda: Around(lambda x: x, 24), rows, loss)


def _ctc(logits: Tensor, target: Tensor) -> Tensor:
    steps = F.log_softmax(logits.unsqueeze(0).repeat(5, 1, 1), -1)
    size = logits.shape[0]
    return F.ctc_loss(
        steps, (target.clamp(min=1)).unsqueeze(1), torch.full((size,), 5),
        torch.full((size,), 1),
    )  # fmt: skip


def _loss_models() -> dict[str, Model]:
    scale = torch.arange(1.0, CLASSES + 1).double()

    def hot(y: Tensor) -> Tensor:
        return F.one_hot(y, CLASSES).double()

    return {
        "ce_weight": _classes(lambda x, y: F.cross_entropy(x, y, weight=scale)),
        "ce_smooth": _classes(lambda x, y: F.cross_entropy(
            x, y, weight=scale, label_smoothing=0.2, ignore_index=1)),
        "ce_ignore": _classes(lambda x, y: F.cross_entropy(x, y, ignore_index=2)),
        "ce_sum": _classes(lambda x, y: F.cross_entropy(x, y, reduction="sum")),
        "ce_none": _classes(lambda x, y: F.cross_entropy(x, y, reduction="none").square().mean()),
        "ce_soft": _classes(lambda x, y: F.cross_entropy(
            x, torch.softmax(hot(y), -1), weight=scale)),
        "nll": _classes(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y, weight=scale)),
        "bce_pos": _classes(lambda x, y: F.binary_cross_entropy_with_logits(
            x, hot(y), pos_weight=scale)),
        "bce_weight": _classes(lambda x, y: F.binary_cross_entropy(
            x.sigmoid(), hot(y), weight=scale)),
        "multi_margin": _classes(lambda x, y: F.multi_margin_loss(x, y, weight=scale)),
        "multilabel": _classes(lambda x, y: F.multilabel_soft_margin_loss(x, hot(y))),
        "kl": _classes(lambda x, y: F.kl_div(
            F.log_softmax(x, -1), torch.softmax(hot(y), -1), reduction="batchmean")),
        "poisson_nll": _classes(lambda x, y: F.poisson_nll_loss(x, hot(y))),
        "gaussian_nll": _classes(lambda x, y: F.gaussian_nll_loss(x, hot(y), x.exp())),
        "huber": _classes(lambda x, y: F.huber_loss(x, hot(y), delta=0.3)),
        "smooth_l1_sum": _classes(lambda x, y: F.smooth_l1_loss(x, hot(y), reduction="sum")),
        "rms": _classes(lambda x, y: F.mse_loss(x, hot(y)).sqrt()),
        "std_of_batch": _classes(lambda x, y: F.cross_entropy(x, y) + x.std(0).mean()),
        "max_of_batch": _classes(lambda x, y: F.cross_entropy(x, y, reduction="none").max()),
        "logsumexp_batch": _classes(lambda x, y: F.cross_entropy(
            x, y, reduction="none").logsumexp(0)),
        "ctc": _classes(_ctc),
        "infonce": paired(_infonce),
        "cosine_loss": paired(lambda a, b: F.cosine_embedding_loss(
            a, b, torch.ones(a.shape[0]).double())),
        "triplet": paired(lambda a, b: F.triplet_margin_loss(a, b, b.roll(1, 1))),
        "margin_rank": paired(lambda a, b: F.margin_ranking_loss(
            a[:, 0], b[:, 0], torch.ones(a.shape[0]).double(), margin=0.2)),
        "triplet_batch": paired(lambda a, b: F.triplet_margin_loss(a, b, b.roll(1, 0))),
        "vicreg": paired(lambda a, b: (a.T.cov() - b.T.cov()).square().sum()),
        "barlow": paired(lambda a, b: ((a - a.mean(0)).T @ (b - b.mean(0)) / a.shape[0]
                                       ).square().mean()),
        "pdist": paired(lambda a, b: torch.cdist(a, b).mean()),
        "correlation": paired(lambda a, b: 1 - torch.corrcoef(
            torch.stack([a.flatten(), b.flatten()]))[0, 1]),
    }  # fmt: skip


class Bilinear(nn.Module):
    """Both operands of a bilinear come from linears."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 10)
        self.both, self.head = nn.Bilinear(8, 10, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.both(self.left(x), self.right(x))))


class Bags(nn.Module):
    """Bags with weights for their words, which are learned too."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, WIDTH, **given)
        self.weight = nn.Parameter(torch.rand(TOKENS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x, per_sample_weights=self.weight.expand(x.shape)))


def _word_models() -> dict[str, Model]:
    return {
        "embedding": embedded(),
        "embedding_padding": embedded(padding_idx=0),
        "embedding_padding_back": embedded(padding_idx=-2),
        "embedding_freq": embedded(scale_grad_by_freq=True),
        "embedding_freq_padding": embedded(scale_grad_by_freq=True, padding_idx=0),
        "embedding_max_norm": embedded(max_norm=1.0),
        "bag_sum": bagged(mode="sum"),
        "bag_mean": bagged(mode="mean"),
        "bag_mean_padding": bagged(mode="mean", padding_idx=0),
        "bag_max": bagged(mode="max"),
        "bag_freq": bagged(mode="sum", scale_grad_by_freq=True),
        "bag_mean_freq": bagged(mode="mean", scale_grad_by_freq=True),
        "bag_max_norm": bagged(mode="sum", max_norm=1.0),
        "bag_weights": Model(lambda: Bags(mode="sum"), words),
        "bag_weights_freq": Model(lambda: Bags(mode="sum", scale_grad_by_freq=True), words),
        "bilinear": Model(Bilinear, rows),
        "layer_norm_2": Model(lambda: Around(nn.LayerNorm((TOKENS, 24)).double(), 24), tokens),
        "lstm": Model(lambda: Around(Second(nn.LSTM(24, 16, batch_first=True)), 16), tokens),
        "gru": Model(lambda: Around(Second(nn.GRU(
            24, 8, batch_first=True, bidirectional=True)), 16), tokens),
        "spectral_linear": Model(lambda: Around(
            nn.utils.parametrizations.spectral_norm(nn.Linear(24, 12)), 12), tokens,
            per_microbatch=True),
        "weight_norm_linear": Model(lambda: Around(
            nn.utils.parametrizations.weight_norm(nn.Linear(24, 12)), 12), tokens),
        "orthogonal_linear": Model(lambda: Around(
            nn.utils.parametrizations.orthogonal(nn.Linear(24, 12)), 12), tokens),
    }  # fmt: skip


class Second(nn.Module):
    """What a recurrent layer makes, without its state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


MODULES: dict[str, Model] = {**_word_models(), **_loss_models(), **_image_models()}
