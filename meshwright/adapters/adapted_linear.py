"""A frozen linear layer with a trained adapter beside it."""

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.adapters.kinds import adapter_kind
from meshwright.adapters.linears import weight_of
from meshwright.adapters.quantised_linear import QuantisedLinear
from meshwright.ir.errors import PlanError


class AdaptedLinear(nn.Module):
    """base(x) + scaling * repeat(up(down(mean of neighbours(x)))), x [..., in] -> [..., out]; zero
    beside the base at the start."""

    def __init__(
        self, base: nn.Module, kind: str, rank: int, alpha: float, dropout: float = 0.0
    ) -> None:
        """`base`: a plain linear layer or a quantised one, which is frozen. PlanError where the
        kind of adapter does not go with its shape."""
        super().__init__()
        shape = adapter_kind(kind)
        is_quantised = isinstance(base, QuantisedLinear)
        if shape.pooled == 0 and not is_quantised:
            raise PlanError(
                f"an adapter of kind {kind} reads blocks of a quantised layer, and this one is "
                "none: quantise the model first; nearest kind for it is 'balanced'"
            )
        pooled = shape.pooled or int(base.block)  # type: ignore[arg-type]
        self.base, self.kind, self.rank, self.dropout = base, kind, rank, dropout
        self.alpha, self.scaling = alpha, alpha / rank
        self.pooled, self.repeated = pooled, shape.repeated
        out_features, in_features = _shape(base)
        _check_divides("inputs", in_features, pooled)
        _check_divides("outputs", out_features, shape.repeated)
        like = base.scale if isinstance(base, QuantisedLinear) else weight_of(base)
        size = (shape.ranks * rank, in_features // pooled)
        self.down = nn.Parameter(torch.empty(size, dtype=like.dtype, device=like.device))
        nn.init.kaiming_uniform_(self.down, a=sqrt(5))
        size = (out_features // shape.repeated, shape.ranks * rank)
        self.up = nn.Parameter(torch.zeros(size, dtype=like.dtype, device=like.device))
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out]."""
        read = F.dropout(x, self.dropout, self.training) if self.dropout else x
        if self.pooled > 1:
            groups = read.shape[-1] // self.pooled
            read = read.reshape(*read.shape[:-1], groups, self.pooled).mean(-1)
        made = F.linear(F.linear(read, self.down), self.up) * self.scaling
        if self.repeated > 1:
            made = made.unsqueeze(-1).expand(*made.shape, self.repeated).flatten(-2)
        base: Tensor = self.base(x)
        return base + made

    def change(self) -> Tensor:
        """Returns what the adapter adds to the weight, [out, in / pooled]: the same for each of
        `pooled` neighbouring inputs."""
        with torch.no_grad():
            found = self.up @ self.down * (self.scaling / self.pooled)
            return found.repeat_interleave(self.repeated, 0)

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Returns the base, changed, which then computes what both did. PlanError as of
        `check_merges`."""
        self.check_merges()
        base, change = self.base, self.change()
        if not isinstance(base, QuantisedLinear):
            weight_of(base).add_(change.repeat_interleave(self.pooled, 1))
            return base
        assert base.zero is not None
        by_block = change.repeat_interleave(self.pooled // base.block, 1)
        base.zero.sub_(by_block / base.scale)
        return base

    def check_merges(self) -> None:
        """PlanError where a quantised weight would have to be quantised anew, which would not be
        exact."""
        base = self.base
        if not isinstance(base, QuantisedLinear):
            return
        if base.zero is None or self.pooled % base.block:
            why = (
                f"{base.form} has no zero points" if base.zero is None
                else f"it reads means of {self.pooled} inputs, and a block is of {base.block}"
            )  # fmt: skip
            raise PlanError(
                f"an adapter of kind {self.kind} does not merge into a base of {base.form}: {why}; "
                "nearest is kind 'pooled' on 'int4' or 'int8', or keep the adapter beside it"
            )

    def extra_repr(self) -> str:
        return f"kind={self.kind}, rank={self.rank}, alpha={self.alpha:g}"


def _shape(base: nn.Module) -> tuple[int, int]:
    if isinstance(base, QuantisedLinear):
        return base.out_features, base.in_features
    rows, columns = weight_of(base).shape
    return rows, columns


def _check_divides(what: str, size: int, by: int) -> None:
    if size % by:
        raise PlanError(
            f"{size} {what} are not groups of {by}; nearest is kind 'lora', which has no groups"
        )
