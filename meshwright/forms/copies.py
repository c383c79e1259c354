"""Copies of parameters that blocks read, in a narrower dtype than the optimizer steps, under a form
that knows nothing of them.

The form has whole parameters in the optimizer's dtype. A form with `COPIES` sends and keeps copies
itself (`forms.flat`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meshwright.forms.around import AroundRun
from meshwright.forms.running import LaterStep, Samples, Slot, SyncRun, SyncState


def stepped_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Returns slots whose parameters are what the optimizer steps: those of `slots` in its dtype,
    made anew; what is not trained is the same."""
    return [
        Slot(slot.param, nn.Parameter(slot.whole.detach().to(slot.stepped, copy=True)), slot.calls)
        if slot.is_copy else slot
        for slot in slots
    ]  # fmt: skip


class CopiedRun(AroundRun):
    """A form's run over `stepped` slots, and the copies of them that blocks read."""

    def __init__(
        self,
        inner: SyncRun,
        slots: Sequence[Slot],
        stepped: Sequence[Slot],
        *,
        casts: bool = True,
    ) -> None:
        """`casts`: copies get their values here; else somebody else gives them these."""
        super().__init__(inner)
        self._pairs = [(a, b) for a, b in zip(slots, stepped, strict=True) if a is not b]
        self._read: dict[int, list[tuple[Slot, Slot]]] = {}
        """By the call that reads them."""
        self._owned: dict[int, list[tuple[Slot, Slot]]] = {}
        """By the call that is the last to add to their gradients."""
        for pair in self._pairs:
            self._owned.setdefault(pair[0].owner, []).append(pair)
            for call in pair[0].calls if casts else ():
                self._read.setdefault(call, []).append(pair)
        self._calls = frozenset(self._read)
        self._stale: set[int] = set()
        """Calls that read copies of parameters that may have changed."""

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for copy, _ in self._pairs:
            copy.whole.grad = None
        super().begin(batch, next_batch)
        self._stale |= self._calls

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        super().more(batch, next_batch)
        if self.reads_batches:  # other rows are there
            self._stale |= self._calls

    def look_up(self, batch: Samples) -> None:
        super().look_up(batch)
        self._stale |= self._calls

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        super().before_forward(call, ahead)
        self._cast(call)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        super().before_backward(call, ahead)
        self._cast(call)

    def _cast(self, call: int) -> None:
        if call not in self._stale:
            return
        self._stale.discard(call)
        copies, values = list[Tensor](), list[Tensor]()
        # No graph is alive that has kept them: a call's copies are cast before its first forward.
        with torch.no_grad():
            for copy, stepped in self._read[call]:
                if copy.whole.shape == stepped.whole.shape:
                    copies.append(copy.whole)
                    values.append(stepped.whole)
                else:  # the form has some rows only
                    copy.whole.data = stepped.whole.detach().to(copy.whole.dtype)
            if copies:
                torch._foreach_copy_(copies, values)

    def after_backward(self, call: int, last: bool) -> None:
        add_gradients([(stepped.whole, copy.whole) for copy, stepped in self._owned.get(call, ())])
        super().after_backward(call, last)

    def updated(self, later: Callable[[], LaterStep]) -> None:
        super().updated(later)
        self._stale |= self._calls

    def written(self) -> None:
        super().written()
        self._stale |= self._calls

    def load(self, state: SyncState) -> None:
        super().load(state)
        self._stale |= self._calls


def add_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Adds gradients of copies to those of what the optimizer steps, in their dtype: pairs of a
    parameter that is stepped and its copy, which has no gradient afterwards."""
    sums, more = [], []
    for parameter, copy in pairs:
        gradient, copy.grad = copy.grad, None
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            sums.append(parameter.grad)
            more.append(gradient)
    if sums:
        torch._foreach_add_(sums, more)
