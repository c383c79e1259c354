"""Products of runs of rows with a matrix each: rows of pairs of a token and an expert, by expert.

On a CPU that is a loop over runs. On a GPU it is one kernel of torch, which reads from device
memory where runs end, so that nothing waits for the GPU; rows of pairs that are not here then stay
at the end, hold anything, and are masked where rows are put together again. Where experts are some
of all, most pairs may not be here: the device is waited for once, and only those that are here have
rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.ir.torch_private import GROUPED_MM

_ALIGNED_BYTES = 16
"""What rows and columns of the kernel's operands are multiples of."""


@dataclass(frozen=True, slots=True)
class PairGroups:
    """Pairs [pairs] in order of their experts."""

    tokens: torch.Tensor
    """Token of each pair."""
    order: torch.Tensor
    """Place of each pair among all of them, token by token."""
    owners: torch.Tensor
    """Expert of each pair that is here; any other number of theirs for the others."""
    counts: tuple[int, ...]
    """Pairs of each expert; empty where only the device knows."""
    ends: torch.Tensor | None
    """Where the run of each expert ends, as the kernel takes it."""
    picked_each: int
    """K of a token."""
    experts: int
    exact: bool = True
    """There is a row for each pair that is here, and for no other."""

    def picked(self, flat: torch.Tensor) -> torch.Tensor:
        """Of a value of all T*K pairs: those of these rows."""
        return flat.index_select(0, self.order)

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """[pairs, n] of a value of each token [T, n]."""
        return values.index_select(0, self.tokens)

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """[pairs, n] of a value of each expert [E, n]."""
        return values.index_select(0, self.owners)

    def sums_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[E, n]: rows [pairs, n] summed over each expert's run, in float32 or wider."""
        wide = _wide(self._here(rows))
        return wide.new_zeros(self.experts, rows.shape[1]).index_add_(0, self.owners, wide)

    def most_of(self, rows: torch.Tensor) -> torch.Tensor:
        """[E, n]: the largest of rows [pairs, n], by size, over each expert's run; 0 of none."""
        most = self._here(rows).abs()
        return most.new_zeros(self.experts, rows.shape[1]).index_reduce_(
            0, self.owners, most, "amax"
        )

    def summed(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows [pairs, H] summed over the pairs of each token, as `like` [T, H]."""
        rows = self._here(rows)
        if self.ends is None:
            wide = _wide(rows)
            return wide.new_zeros(like.shape).index_add_(0, self.tokens, wide).to(like.dtype)
        # A GPU would add them up in another order each time.
        if self.exact:
            by_token = self.order.argsort()
            each = torch.arange(len(like) + 1, device=rows.device)
            starts = torch.searchsorted(self.tokens[by_token], each)
            bags = F.embedding_bag(by_token, rows, starts, mode="sum", include_last_offset=True)
            return bags.to(like.dtype)
        places = torch.arange(len(rows), device=rows.device)
        back = torch.empty_like(self.order).index_copy_(0, self.order, places)
        by_token = rows.index_select(0, back).view(len(like), self.picked_each, rows.shape[1])
        return by_token.sum(1).to(like.dtype)

    def placed(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Values [pairs] where the pairs are in `like` [T, K]; 0 for pairs that are not here."""
        made = torch.zeros_like(like, memory_format=torch.contiguous_format)
        made.view(-1)[self.order] = self._here(values).to(like.dtype)
        return made

    def _here(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows with zeros for pairs that are not here."""
        if self.exact or self.ends is None:
            return rows
        here = torch.arange(len(rows), device=rows.device) < self.ends[-1]
        return torch.where(here.view(-1, *[1] * (rows.ndim - 1)), rows, 0)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """What is added to many times loses its last bits in a narrow dtype."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def takes_kernel(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """Whether products of such rows are made by the kernel."""
    if device.type != "cuda" or dtype != torch.bfloat16 or GROUPED_MM is None:
        return False
    return all(width * dtype.itemsize % _ALIGNED_BYTES == 0 for width in widths)


def groups_of(
    index: torch.Tensor,
    experts: int,
    dtype: torch.dtype,
    widths: tuple[int, ...],
    *,
    some: bool = False,
    known: int | None = None,
) -> PairGroups:
    """The pairs of an index [T, K], of which those outside [0, experts) are not here.

    `some`: these are some of all experts, so that only pairs that are here get rows; `known`: how
    many these are, where that has been asked before.
    """
    flat, picked = index.reshape(-1), index.shape[-1]
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    owners, order = torch.sort(key, stable=True)
    if takes_kernel(index.device, dtype, widths):
        # Not by counts: torch waits for the device to make them.
        each = torch.arange(experts, device=index.device, dtype=owners.dtype)
        ends = torch.searchsorted(owners, each, right=True, out_int32=True)
        if some:
            here = int(ends[-1]) if known is None else known
            order, owners = order[:here], owners[:here]
        owners = owners.clamp(max=experts - 1)
        return PairGroups(order // picked, order, owners, (), ends, picked, experts, exact=some)
    counts = tuple(torch.bincount(key, minlength=experts + 1)[:experts].tolist())
    here = sum(counts)
    order = order[:here]
    return PairGroups(order // picked, order, owners[:here], counts, None, picked, experts)


def grouped(rows: torch.Tensor, weight: torch.Tensor, groups: PairGroups) -> torch.Tensor:
    """[pairs, n] of rows [pairs, m] by each expert's matrix of [E, m, n]."""
    if groups.ends is not None and len(rows):
        return _by_kernel(rows, weight, groups.ends)
    made = rows.new_empty(len(rows), weight.shape[2])
    start = 0
    for expert, count in enumerate(groups.counts):
        if count:
            run = slice(start, start + count)
            torch.mm(rows[run], weight[expert], out=made[run])
        start += count
    return made


def grouped_outer(left: torch.Tensor, right: torch.Tensor, groups: PairGroups) -> torch.Tensor:
    """[E, m, n] of rows [pairs, m] and [pairs, n]: their product over each expert's run."""
    if not len(left):
        return left.new_zeros(groups.experts, left.shape[1], right.shape[1])
    if groups.ends is not None:
        return _by_kernel(left.t(), right, groups.ends)
    made = left.new_empty(groups.experts, left.shape[1], right.shape[1])
    start = 0
    for expert, count in enumerate(groups.counts):
        run = slice(start, start + count)
        torch.mm(left[run].t(), right[run], out=made[expert])
        start += count
    return made


def _by_kernel(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    kernel: Any = GROUPED_MM
    made: torch.Tensor = kernel(left, right, offs=ends)
    return made
