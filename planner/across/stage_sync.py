"""What synchronising costs kinds of runs of blocks, as arrays: `costmodel.stage.sync` all at once.

The order of jobs on the channel is not played, but summed up: what can hide behind the computing
beside it does, and the rest is exposed.
"""

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.ops.overheads import Overheads
from meshwright.costmodel.stage.gathers import UNPACKED
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.costmodel.stage.sync import PACKED
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Send
from meshwright.ir.layout.conversions import Primitive
from meshwright.planner.across.spans import Collectives, Matrix
from meshwright.planner.problem.space import Mesh


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters of runs of blocks on a rank, in bytes."""

    whole: Matrix
    largest: Matrix
    """Of the largest block."""
    gathered_s: Matrix
    """Gathering block after block, once; zeros where blocks are not gathered."""
    scattered_s: Matrix
    """Reducing them block after block; zeros where blocks are not gathered."""
    first_gather_s: Matrix
    """Gathering the largest block; zeros where blocks are not gathered."""


@dataclass(frozen=True, slots=True)
class StageSync:
    """One way to synchronise a stage."""

    mesh: Mesh
    """As it is for the parameters that are meant."""
    lines: ReplicaLines
    overheads: Overheads
    collective: Collectives
    bucket_bytes: int

    @property
    def exchange(self) -> Exchange:
        return self.mesh.exchange

    def copies_s(self, nbytes: Matrix) -> Matrix:
        found: Matrix = nbytes * (self.overheads.copy_s(1e9) / 1e9)
        return found

    def per_microbatch_s(self, trained: Trained, busy_s: Matrix, backward_s: Matrix) -> Matrix:
        """What a forward and a backward take more."""
        whole, shard, exchange = trained.whole, self.mesh.dp_shard, self.exchange
        every, fetches = exchange.every_backward, exchange.fetches
        if not every and not fetches:
            return np.zeros_like(whole)
        packed = PACKED * exchange.summed * whole
        packing = self.copies_s(packed * (1 + 1 / shard)) if every else 0.0
        if fetches:
            # A gather waits for the scatter before it, unless they go beside each other.
            moving = len(fetches) * trained.gathered_s + trained.scattered_s
            if self.overheads.device.kind == "cpu" and not self.mesh.prefetch:
                moving -= np.minimum(trained.scattered_s, backward_s + trained.gathered_s)
            if self.mesh.prefetch:
                # The first gather of each direction finds nothing to hide behind.
                moving = np.maximum(moving - busy_s, len(fetches) * trained.first_gather_s)
            unpacked = sum([UNPACKED * send.unpacks for send in fetches])
            return packing + self.copies_s(unpacked * exchange.read * whole) + moving
        count, one_s = self._buckets(whole, every[0])
        found: Matrix = packing + np.maximum(0.0, count - 2) * np.maximum(
            0.0, one_s - backward_s / count
        )
        return found

    def once_s(
        self, trained: Trained, backward_s: Matrix, forward_s: Matrix, step_s: Matrix
    ) -> Matrix:
        """Gradients that are still on their way after the last backward, and parameters; of what
        goes beside the next forward, or beside steps, what these do not hide."""
        whole, shard, exchange = trained.whole, self.mesh.dp_shard, self.exchange
        found = np.zeros_like(whole)
        for send in exchange.at_end:
            nbytes = send.times * (whole / shard if send.of_part else whole)
            found = found + self.collective(send.primitive, nbytes, self.lines.levels(send.axis))
        for send in exchange.last_backward:
            if send.packs:
                found = found + self.copies_s(PACKED * send.times * whole)
            found = found + self._exposed(whole, send, backward_s)
        for send in () if exchange.reduces_blocks else exchange.every_backward:
            found = found + self._buckets(whole, send)[1]
        for send in exchange.published:
            count, gather_s = self._buckets(whole, send)
            packed = {"": 0, "whole": PACKED, "part": PACKED / shard}[send.packs]
            copied_s = self.copies_s(send.times * whole * (UNPACKED * send.unpacks + packed))
            if send.ahead and self.overheads.device.kind != "cpu":
                # All but those of one bucket go beside gathers.
                copied_s = np.maximum(copied_s / count, copied_s - (count - 1) * gather_s)
            found = found + count * gather_s + copied_s
        for send in exchange.late:
            count, one_s = self._buckets(whole, send)
            found = found + np.maximum(0.0, count * one_s - forward_s)
        for send in exchange.lagging:
            count, one_s = self._buckets(whole / shard if send.of_part else whole, send)
            found = found + np.maximum(0.0, count * one_s - send.lag * step_s) / send.every
        for work in exchange.worked_last + exchange.worked_at_end + exchange.cleared:
            found = found + self.copies_s(work.moved * whole)
        return found

    def summed_s(self, nbytes: Matrix, levels: Levels) -> Matrix:
        """Gradients that are summands on a model axis, once per step."""
        held = nbytes / self.exchange.parts("optimizer", self.mesh.dp_shard)
        moving: Matrix = self.collective(Primitive.ALL_REDUCE, held, levels) * (held > 0)
        return moving + self.copies_s(4 * held)

    def _buckets(self, whole: Matrix, send: Send) -> tuple[Matrix, Matrix]:
        """(how many, seconds of one)."""
        count: Matrix = np.maximum(1.0, np.ceil(whole / self.bucket_bytes))
        each = send.times * whole / count
        return count, self.collective(send.primitive, each, self.lines.levels(send.axis))

    def _exposed(self, whole: Matrix, send: Send, backward_s: Matrix) -> Matrix:
        """Of buckets that are reduced as the last backward completes them."""
        count, one_s = self._buckets(whole, send)
        found: Matrix = np.maximum(one_s, count * one_s - backward_s * (count - 1) / count)
        return found

    def gradient_bytes(self, trained: Trained) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """(always, from the first backward on, whole ones beside those, flat ones at most).

        Whole gradients of a bucket are packed when the activations of the same micro-batch have
        gone, and no block runs. Where blocks' gradients go alone, those of one are packed while the
        next one runs.
        """
        whole, exchange = trained.whole, self.exchange
        none = np.zeros_like(whole)
        part = exchange.summed * whole / self.mesh.dp_shard
        bucket = exchange.summed * np.minimum(whole, self.bucket_bytes + trained.largest)
        # What this rank gets of a bucket: on a host all ranks' parts, before it adds them up.
        got = 1.0 if self.overheads.device.kind == "cpu" else 1 / self.mesh.dp_shard
        moving = np.minimum(2 * bucket, exchange.summed * whole)  # two are on their way at most
        always = whole if exchange.sums_into_zeros else none
        largest = exchange.read * trained.largest
        wholes, parts = exchange.begun
        begun = wholes * whole + parts * whole / self.mesh.dp_shard
        if not exchange.packs:
            return always, begun, none, none
        if not exchange.every_backward:
            return always, begun, none, bucket + np.maximum(part, got * moving)
        if exchange.reduces_blocks:
            return always, begun, largest, (1 + got) * trained.largest
        return always, begun, bucket, (1 + got) * moving
