"""Values of a batch in bags, one for each sample, that lie where another input says."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import is_fake

Runs = Sequence[tuple[int, int]]
"""Consecutive samples, from one to before another, run after run."""


@dataclass(frozen=True, eq=False)
class Bags:
    """Where bags of a batch lie."""

    offsets: Tensor
    """[samples] the first value of each, or [samples + 1] with the end of the last one."""
    last: bool

    def checked(self, name: str, count: int) -> "Bags":
        """The same; PlanError if `count` values have no such bags. `name`: of the input."""
        if is_fake(self.offsets) or not len(self.offsets):
            return self
        ends = torch.cat([self.offsets, self.offsets.new_tensor([count])])
        if int(self.offsets[0]) != 0 or bool((ends.diff() < 0).any()):
            raise PlanError(
                f"batch input {name!r} says where bags of {count} values begin: its numbers must "
                f"begin with 0, never fall and be {count} at most"
            )
        return self

    def values(self, x: Tensor, runs: Runs) -> Tensor:
        """Those of some samples, [values] -> [values of these]."""
        parts = [x[self._begin(a, len(x)) : self._begin(b, len(x))] for a, b in runs]
        return parts[0] if len(parts) == 1 else torch.cat([x[:0], *parts])

    def places(self, runs: Runs, count: int) -> Tensor:
        """Offsets of the same, in what `values` makes of `count` values: with the end, if it is
        said of all."""
        before, parts = 0, [self.offsets[:0]]
        for first, end in runs:
            begin = self._begin(first, count)
            parts.append(self.offsets[first:end] - (begin - before))
            before += self._begin(end, count) - begin
        if self.last:
            parts.append(self.offsets.new_full((1,), before))
        return torch.cat(parts)

    def _begin(self, sample: int, count: int) -> int:
        """The first value of a sample; of the one after the last, the end of all."""
        samples = len(self.offsets) - self.last
        if is_fake(self.offsets):  # there are no numbers: bags are of the mean length
            return sample * count // max(1, samples)
        return int(self.offsets[sample]) if sample < len(self.offsets) else count
