"""What synchronising costs kinds of runs of blocks, as arrays: `costmodel.sync` all at once.

The order of jobs on the channel is not played, but summed up: what can hide behind the computing
beside it does, and the rest is exposed.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.comm import Levels
from meshwright.costmodel.overheads import Overheads
from meshwright.ir.conversions import Primitive
from meshwright.planner.across.spans import Collectives, Matrix
from meshwright.planner.space import Mesh


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters of runs of blocks on a rank, in bytes."""

    whole: Matrix
    largest: Matrix
    """Of the largest block."""
    gathered_s: Matrix
    """Gathering block after block, once; zeros below level 3."""
    scattered_s: Matrix
    """Reducing them block after block; zeros below level 3."""
    first_gather_s: Matrix
    """Gathering the largest block; zeros below level 3."""


@dataclass(frozen=True, slots=True)
class StageSync:
    """One way to synchronise a stage."""

    mesh: Mesh
    dp: Levels
    shard: Levels
    replicate: Levels
    overheads: Overheads
    collective: Collectives
    bucket_bytes: int

    @property
    def zero(self) -> int:
        return self.mesh.zero if self.mesh.dp_shard > 1 else 0

    def copies_s(self, nbytes: Matrix) -> Matrix:
        found: Matrix = nbytes * (self.overheads.copy_s(1e9) / 1e9)
        return found

    def per_microbatch_s(self, trained: Trained, busy_s: Matrix, backward_s: Matrix) -> Matrix:
        """What a forward and a backward take more."""
        whole, shard = trained.whole, self.mesh.dp_shard
        if self.zero < 2:
            return np.zeros_like(whole)
        packing = self.copies_s(3 * whole * (1 + 1 / shard))
        if self.zero == 3:
            # A gather waits for the scatter before it, unless they go beside each other.
            moving = 2 * trained.gathered_s + trained.scattered_s
            if self.overheads.device.kind == "cpu" and not self.mesh.prefetch:
                moving -= np.minimum(trained.scattered_s, backward_s + trained.gathered_s)
            if self.mesh.prefetch:
                # The first gather of each direction finds nothing to hide behind.
                moving = np.maximum(moving - busy_s, 2 * trained.first_gather_s)
            return packing + self.copies_s(4 * whole) + moving
        count, one_s = self._buckets(whole, Primitive.REDUCE_SCATTER, self.shard)
        found: Matrix = packing + np.maximum(0.0, count - 2) * np.maximum(
            0.0, one_s - backward_s / count
        )
        return found

    def once_s(self, trained: Trained, backward_s: Matrix) -> Matrix:
        """Gradients that are still on their way after the last backward, and parameters."""
        whole, shard = trained.whole, self.mesh.dp_shard
        if self.zero == 0:
            if not self.dp:
                return np.zeros_like(whole)
            return self._exposed(whole, Primitive.ALL_REDUCE, self.dp, backward_s) + self.copies_s(
                whole
            )
        found = self.collective(Primitive.ALL_REDUCE, whole / shard, self.replicate)
        if self.zero == 1:
            found = found + self.copies_s(3 * whole)
            found += self._exposed(whole, Primitive.REDUCE_SCATTER, self.shard, backward_s)
        if self.zero == 2:
            found = found + self._buckets(whole, Primitive.REDUCE_SCATTER, self.shard)[1]
        if self.zero < 3:
            count, gather_s = self._buckets(whole, Primitive.ALL_GATHER, self.shard)
            found = found + count * gather_s + self.copies_s(whole * (2 + 3 / shard))
        return found

    def summed_s(self, nbytes: Matrix, levels: Levels) -> Matrix:
        """Gradients that are summands on a model axis, once per step."""
        held = nbytes / (self.mesh.dp_shard if self.zero else 1)
        moving: Matrix = self.collective(Primitive.ALL_REDUCE, held, levels) * (held > 0)
        return moving + self.copies_s(4 * held)

    def _buckets(
        self, whole: Matrix, primitive: Primitive, levels: Levels
    ) -> tuple[Matrix, Matrix]:
        """(how many, seconds of one)."""
        count: Matrix = np.maximum(1.0, np.ceil(whole / self.bucket_bytes))
        return count, self.collective(primitive, whole / count, levels)

    def _exposed(
        self, whole: Matrix, primitive: Primitive, levels: Levels, backward_s: Matrix
    ) -> Matrix:
        """Of buckets that are reduced as the last backward completes them."""
        count, one_s = self._buckets(whole, primitive, levels)
        found: Matrix = np.maximum(one_s, count * one_s - backward_s * (count - 1) / count)
        return found

    def gradient_bytes(self, trained: Trained) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """(always, from the first backward on, whole ones beside those, flat ones at most).

        Whole gradients of a bucket are packed when the activations of the same micro-batch have
        gone, and no block runs. Level 3 packs those of one block while the next one runs.
        """
        whole, none = trained.whole, np.zeros_like(trained.whole)
        part = whole / self.mesh.dp_shard
        bucket = np.minimum(whole, self.bucket_bytes + trained.largest)
        # What this rank gets of a bucket: on a host all ranks' parts, before it adds them up.
        got = 1.0 if self.overheads.device.kind == "cpu" else 1 / self.mesh.dp_shard
        moving = np.minimum(2 * bucket, whole)  # two are on their way at most
        match self.zero:
            case 0:
                return (whole, none, none, none) if self.dp else (none, whole, none, none)
            case 1:
                return none, whole, none, bucket + np.maximum(part, got * moving)
            case 2:
                return none, part, bucket, (1 + got) * moving
            case _:
                return none, part, trained.largest, (1 + got) * trained.largest
