"""Copies of parameters that blocks read, in a narrower dtype than the optimizer steps, under a form
that knows nothing of them.

The form has whole parameters in the optimizer's dtype. A form with `COPIES` sends and keeps copies
itself (`forms.flat`).
"""

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor, nn

from meshwright.forms.running import (
    BucketSizes,
    Held,
    LaterStep,
    Samples,
    Slot,
    SyncRun,
    SyncState,
)


def stepped_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Returns slots whose parameters are what the optimizer steps: those of `slots` in its dtype,
    made anew; what is not trained is the same."""
    return [
        Slot(slot.param, nn.Parameter(slot.whole.detach().to(slot.stepped, copy=True)), slot.calls)
        if slot.is_copy else slot
        for slot in slots
    ]  # fmt: skip


class CopiedRun(SyncRun):
    """A form's run over `stepped` slots, and the copies of them that blocks read."""

    def __init__(self, run: SyncRun, slots: Sequence[Slot], stepped: Sequence[Slot]) -> None:
        self._run = run
        self._pairs = [(a, b) for a, b in zip(slots, stepped, strict=True) if a is not b]
        self.held, self.whole_updates = run.held, run.whole_updates
        self.own_states, self.reads_batches = run.own_states, run.reads_batches
        self._stale: set[int] = set()
        """Calls that read copies of parameters that may have changed."""
        self._calls = {call for slot, _ in self._pairs for call in slot.calls}

    @property
    def bucket_sizes(self) -> tuple[BucketSizes, ...]:
        return self._run.bucket_sizes

    @property
    def reduced(self) -> tuple[Held, ...]:
        return self._run.reduced

    @property
    def is_settled(self) -> bool:
        return self._run.is_settled

    def hold_nothing_back(self) -> None:
        self._run.hold_nothing_back()

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for copy, _ in self._pairs:
            copy.whole.grad = None
        self._run.begin(batch, next_batch)
        self._stale |= self._calls

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._run.more(batch, next_batch)
        if self.reads_batches:  # other rows are there
            self._stale |= self._calls

    def look_up(self, batch: Samples) -> None:
        self._run.look_up(batch)
        self._stale |= self._calls

    def rows_here(self, path: str) -> Tensor | None:
        return self._run.rows_here(path)

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        self._run.before_forward(call, ahead)
        self._cast(call)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        self._run.before_backward(call, ahead)
        self._cast(call)

    def _cast(self, call: int) -> None:
        if call not in self._stale:
            return
        self._stale.discard(call)
        with torch.no_grad():
            for copy, stepped in self._pairs:
                if call not in copy.calls:
                    continue
                # `.data` has its own version counter: it does not look like a change.
                now = stepped.whole.detach()
                if copy.whole.shape == now.shape:
                    copy.whole.data.copy_(now)
                else:  # the form has some rows only
                    copy.whole.data = now.to(copy.whole.dtype)

    def close(self, call: int) -> None:
        self._run.close(call)

    def after_backward(self, call: int, last: bool) -> None:
        for copy, stepped in self._pairs:
            if copy.owner == call and copy.whole.grad is not None:
                add_gradient(stepped.whole, copy.whole.grad)
                copy.whole.grad = None
        self._run.after_backward(call, last)

    def finish(self) -> None:
        self._run.finish()

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        return self._run.over_gradients(stepped)

    def skipped(self) -> None:
        self._run.skipped()

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._run.updated(later)
        self._stale |= self._calls

    def written(self) -> None:
        self._run.written()
        self._stale |= self._calls

    def settle(self) -> None:
        self._run.settle()

    @property
    def kept(self) -> list[Tensor]:
        return self._run.kept

    def state(self) -> SyncState:
        return self._run.state()

    def load(self, state: SyncState) -> None:
        self._run.load(state)
        self._stale |= self._calls

    def regroup(self, bucket_bytes: int) -> None:
        self._run.regroup(bucket_bytes)


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Adds a gradient of a copy to that of what the optimizer steps, in its dtype."""
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
