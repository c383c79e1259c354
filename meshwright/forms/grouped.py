"""One stage whose parameters have several forms, or a store that does more than keep them: calls go
to all of them, in one order on all ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from meshwright.forms.running import (
    BucketSizes,
    Held,
    LaterStep,
    Lines,
    ParameterStore,
    Samples,
    Slot,
    SyncRun,
    SyncState,
)
from meshwright.forms.storage import running_store
from meshwright.forms.sync import running, store_of
from meshwright.ir.plan.parameters import groups_of
from meshwright.ir.plan.plan import Stage


def run_of(slots: Sequence[Slot], lines: Lines, stage: Stage) -> SyncRun:
    """Makes what keeps and synchronises a stage's parameters on a rank, as the plan says."""
    by_path = {slot.param.fqn: slot for slot in slots}
    members = []
    for view, _, paths in groups_of(stage, by_path):
        own = [by_path[path] for path in paths]
        store = running_store(store_of(view)).build(own, lines, view)
        members.append(_Member(running(view.sync_form).build(own, lines, view, store), store))
    if len(members) == 1 and type(members[0].store) is ParameterStore:
        return members[0].run
    return GroupedRun(members)


@dataclass(frozen=True, eq=False, slots=True)
class _Member:
    run: SyncRun
    store: ParameterStore


class GroupedRun(SyncRun):
    """Runs of one stage, each over its own parameters."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = tuple(members)
        self._runs = tuple(member.run for member in members)
        self.held = _all(run.held for run in self._runs)
        self.whole_updates = all(run.whole_updates for run in self._runs)
        self.reads_batches = any(run.reads_batches for run in self._runs)
        self.own_states = any(run.own_states for run in self._runs)

    @property
    def bucket_sizes(self) -> tuple[BucketSizes, ...]:
        return tuple(size for run in self._runs for size in run.bucket_sizes)

    @property
    def reduced(self) -> tuple[Held, ...]:
        return _all(run.reduced for run in self._runs)

    @property
    def is_settled(self) -> bool:
        return all(run.is_settled for run in self._runs)

    def hold_nothing_back(self) -> None:
        for run in self._runs:
            run.hold_nothing_back()

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for run in self._runs:
            run.begin(*((batch, next_batch) if run.reads_batches else ()))

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for run in self._runs:
            run.more(*((batch, next_batch) if run.reads_batches else ()))

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        for member in self._members:
            member.run.before_forward(call, ahead)
            member.store.before_forward(call, ahead)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        for member in self._members:
            member.run.before_backward(call, ahead)
            member.store.before_backward(call, ahead)

    def close(self, call: int) -> None:
        for member in self._members:
            member.run.close(call)
            member.store.close(call)

    def after_backward(self, call: int, last: bool) -> None:
        for run in self._runs:
            run.after_backward(call, last)

    def finish(self) -> None:
        for run in self._runs:
            run.finish()

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        return [x for run in self._runs for x in run.over_gradients(stepped)]

    def updated(self, later: Callable[[], LaterStep]) -> None:
        for run in self._runs:
            run.updated(later)

    def written(self) -> None:
        for run in self._runs:
            run.written()

    def settle(self) -> None:
        for run in self._runs:
            run.settle()

    @property
    def kept(self) -> list[Tensor]:
        return [x for run in self._runs for x in run.kept]

    def state(self) -> SyncState:
        return {
            f"{number}.{key}": value
            for number, run in enumerate(self._runs) for key, value in run.state().items()
        }  # fmt: skip

    def load(self, state: SyncState) -> None:
        for number, run in enumerate(self._runs):
            run.load(_under(f"{number}.", state))

    def regroup(self, bucket_bytes: int) -> None:
        for run in self._runs:
            if run.bucket_sizes:
                run.regroup(bucket_bytes)


def _all(found: Iterable[tuple[Held, ...]]) -> tuple[Held, ...]:
    return tuple(held for own in found for held in own)


def _under(prefix: str, state: Mapping[str, object]) -> SyncState:
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}
