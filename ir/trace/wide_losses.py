"""Losses are computed in the numbers that are stepped, also where a model that reads narrower
copies of its parameters has its loss inside."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright.ir.precision import CopyTypes
from meshwright.ir.torch_private import map_tensors
from meshwright.ir.trace.module_numbers import ModuleCasts

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

    def __init__(self, casts: ModuleCasts, copies: CopyTypes) -> None:
        super().__init__()
        self._casts, self._copies = casts, copies

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            wide = partial(widened, self._casts, self._copies)
            args, kwargs = map_tensors(wide, (tuple(args), dict(kwargs)))
        elif func is torch.Tensor.float and self._copies.stepped is torch.float32:
            args = (self._casts.as_made(args[0]), *args[1:])
        return func(*args, **kwargs)


def widened(casts: ModuleCasts, copies: CopyTypes, x: torch.Tensor) -> torch.Tensor:
    """Returns what a loss gets of a tensor: as the last module made it, and in the dtype of what is
    stepped if it is in that of copies."""
    x = casts.as_made(x)
    return x.to(copies.stepped) if x.dtype == copies.read else x
