"""What runs around a form of synchronisation: it hands every call on, and changes some."""

from collections.abc import Callable, Mapping, Sequence, Set

from torch import Tensor

from meshwright.forms.rows_here import RowsHere
from meshwright.forms.running import (
    BucketSizes,
    Found,
    Held,
    LaterStep,
    Samples,
    SomeRows,
    SyncRun,
    SyncState,
)


class AroundRun(SyncRun):
    """Does all that the run inside does."""

    def __init__(self, inner: SyncRun) -> None:
        self.inner = inner
        self.held, self.whole_updates = inner.held, inner.whole_updates
        self.own_states, self.reads_batches = inner.own_states, inner.reads_batches

    @property
    def bucket_sizes(self) -> tuple[BucketSizes, ...]:
        return self.inner.bucket_sizes

    @property
    def reduced(self) -> tuple[Held, ...]:
        return self.inner.reduced

    @property
    def some_rows(self) -> tuple[SomeRows, ...]:
        return self.inner.some_rows

    def spread(self) -> None:
        self.inner.spread()

    @property
    def is_settled(self) -> bool:
        return self.inner.is_settled

    def take_buffers(self, buffers: Sequence[Tensor]) -> None:
        self.inner.take_buffers(buffers)

    def hold_nothing_back(self) -> None:
        self.inner.hold_nothing_back()

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self.inner.begin(batch, next_batch)

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self.inner.more(batch, next_batch)

    def coming(self, batches: Sequence[Samples]) -> None:
        self.inner.coming(batches)

    def look_up(self, batch: Samples) -> None:
        self.inner.look_up(batch)

    def watch(self, state: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        self.inner.watch(state)

    @property
    def found(self) -> tuple[Found, ...]:
        return self.inner.found

    def rows_here(self, path: str) -> RowsHere | None:
        return self.inner.rows_here(path)

    def tap(
        self, path: str, made: Tensor, read: Tensor, window: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        return self.inner.tap(path, made, read, window)

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        self.inner.before_forward(call, ahead)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        self.inner.before_backward(call, ahead)

    def close(self, call: int) -> None:
        self.inner.close(call)

    def after_forward(self, call: int, last: bool) -> None:
        self.inner.after_forward(call, last)

    def after_backward(self, call: int, last: bool) -> None:
        self.inner.after_backward(call, last)

    def arrived(self) -> Sequence[Tensor]:
        return self.inner.arrived()

    def stay_until_summed(self, names: Set[str]) -> None:
        self.inner.stay_until_summed(names)

    def finish(self) -> None:
        self.inner.finish()

    def leave(self) -> None:
        self.inner.leave()

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        return self.inner.over_gradients(stepped)

    def skipped(self) -> None:
        self.inner.skipped()

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self.inner.updated(later)

    def written(self) -> None:
        self.inner.written()

    def settle(self) -> None:
        self.inner.settle()

    @property
    def kept(self) -> list[Tensor]:
        return self.inner.kept

    @property
    def on_host(self) -> list[Tensor]:
        return self.inner.on_host

    def state(self) -> SyncState:
        return self.inner.state()

    def load(self, state: SyncState) -> None:
        self.inner.load(state)

    def regroup(self, bucket_bytes: int) -> None:
        self.inner.regroup(bucket_bytes)
