"""Losses are computed in the numbers that are stepped, also where a model that reads narrower
copies of its parameters has its loss inside."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright.ir.precision import CopyTypes
from meshwright.ir.torch_private import map_tensors

_LOSSES = frozenset({
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss,
    F.cross_entropy, F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss, F.kl_div,
    F.l1_loss, F.margin_ranking_loss, F.mse_loss, F.multi_margin_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss, F.smooth_l1_loss,
    F.soft_margin_loss, F.triplet_margin_loss, F.ctc_loss,
})  # fmt: skip
"""Torch's functions that torch.autocast computes in float32, or users expect it to."""


class WideLosses(TorchFunctionMode):
    """Inside, torch's loss functions get what they take of a copy's dtype in that of parameters."""

    def __init__(self, copies: CopyTypes) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            args, kwargs = map_tensors(self._wide, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._copies.stepped) if x.dtype == self._copies.read else x
