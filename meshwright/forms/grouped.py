"""One stage whose parameters have several forms, or a store that does more than keep them: calls go
to all of them, in one order on all ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.forms.copies import CopiedRun, stepped_slots
from meshwright.forms.folding import folded_groups
from meshwright.forms.rows_here import RowsHere
from meshwright.forms.running import (
    BucketSizes,
    Found,
    Held,
    LaterStep,
    Lines,
    ParameterStore,
    Samples,
    Slot,
    SomeRows,
    SyncRun,
    SyncState,
)
from meshwright.forms.storage import running_store
from meshwright.forms.sync import level_of, running, store_of, takes_copies
from meshwright.ir.comm.collective import NotesOfForm
from meshwright.ir.plan.plan import Stage


def run_of(slots: Sequence[Slot], lines: Lines, stage: Stage) -> SyncRun:
    """Makes what keeps and synchronises a stage's parameters on a rank, as the plan says."""
    by_path = {slot.param.fqn: slot for slot in slots}
    sums = {path: frozenset(slot.param.sum_over) for path, slot in by_path.items()}
    groups: dict[str | int, list[_Group]] = {}
    found_groups = folded_groups(stage, by_path, sums)
    views = [(g.stage, own) for g in found_groups for own in _by_copies(g.paths, by_path)]
    for number, (view, paths) in enumerate(views):
        of_view = lines.of(view)
        own = copies = [_left(by_path[path], of_view) for path in paths]
        apart = any(slot.is_copy for slot in own) and not takes_copies(
            view.sync_form, level_of(view)
        )
        if apart:
            own = stepped_slots(own)
        of_form = _noted(of_view, view.sync_form)
        store = running_store(store_of(view)).build(own, of_form, view)
        joins = hasattr(running(view.sync_form), "build_together")
        group = _Group(own, view, store, copies if apart else ())
        groups.setdefault(view.sync_form if joins else number, []).append(group)
    runs = [
        _run_of_form(found, _noted(lines.of(found[0].stage), found[0].stage.sync_form))
        for found in groups.values()
    ]
    stores = [group.store for found in groups.values() for group in found]
    if len(stores) == 1 and type(stores[0]) is ParameterStore:
        return runs[0]
    return GroupedRun(runs, stores)


def _by_copies(paths: Sequence[str], slots: Mapping[str, Slot]) -> list[Sequence[str]]:
    """Paths, those apart that blocks read as they are stepped where they read copies of others: no
    bucket has both, and forms see one kind."""
    if not any(slot.is_copy for slot in slots.values()):
        return [paths]
    wide = [p for p in paths if not slots[p].is_copy and slots[p].whole.requires_grad]
    if not wide:
        return [paths]
    apart = set(wide)
    return [own for own in ([p for p in paths if p not in apart], wide) if own]


def _left(slot: Slot, lines: Lines) -> Slot:
    """The slot, its gradient a sum over those axes alone that are not folded."""
    left = tuple([axis for axis in slot.param.sum_over if axis in lines.model])
    if left == slot.param.sum_over:
        return slot
    return replace(slot, param=replace(slot.param, sum_over=left))


def _noted(lines: Lines, form: str) -> Lines:
    """The lines, all that goes on which is noted as the form's."""
    return replace(lines, recorder=NotesOfForm(lines.recorder, form))


class _Group(NamedTuple):
    """Parameters of which the stage says the same, with what keeps them."""

    slots: Sequence[Slot]
    stage: Stage
    store: ParameterStore
    copies: Sequence[Slot] = ()
    """Of the slots, which blocks read in their place; none: they read these."""


def _run_of_form(groups: Sequence[_Group], lines: Lines) -> SyncRun:
    """Makes what runs a form; one that has `build_together` is one for all of its groups."""
    first, *more = groups
    form: Any = running(first.stage.sync_form)
    made: SyncRun
    if more:
        together = [(group.slots, group.stage, group.store) for group in groups]
        made = form.build_together(together, lines)
    else:
        made = form.build(first.slots, lines, first.stage, first.store)
    outside = not more and first.store.brings_copies
    if not more and not outside:
        made = first.store.around(made, {})
    copies: Sequence[Slot] = ()
    slots = [slot for group in groups for slot in group.slots]
    if any(group.copies for group in groups):
        copies = [slot for group in groups for slot in group.copies or group.slots]
        made = CopiedRun(made, copies, slots, casts=not outside)
    if not outside:
        return made
    read = {id(b.whole): a for a, b in zip(copies, slots, strict=False) if a is not b}
    return first.store.around(made, read)


class GroupedRun(SyncRun):
    """Runs of one stage, each over its own parameters."""

    def __init__(self, runs: Sequence[SyncRun], stores: Sequence[ParameterStore]) -> None:
        self._runs, self._stores = tuple(runs), tuple(stores)
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
    def some_rows(self) -> tuple[SomeRows, ...]:
        return tuple(some for run in self._runs for some in run.some_rows)

    def spread(self) -> None:
        for run in self._runs:
            run.spread()

    @property
    def is_settled(self) -> bool:
        return all(run.is_settled for run in self._runs)

    def take_buffers(self, buffers: Sequence[Tensor]) -> None:
        # They belong to no group: one of those whose replicas train alone has them.
        next(run for run in self._runs if run.own_states).take_buffers(buffers)

    def hold_nothing_back(self) -> None:
        for run in self._runs:
            run.hold_nothing_back()

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for run in self._runs:
            run.begin(*((batch, next_batch) if run.reads_batches else ()))

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for run in self._runs:
            run.more(*((batch, next_batch) if run.reads_batches else ()))

    def coming(self, batches: Sequence[Samples]) -> None:
        for run in self._runs:
            if run.reads_batches:
                run.coming(batches)

    def watch(self, state: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        for run in self._runs:
            run.watch(state)

    @property
    def found(self) -> tuple[Found, ...]:
        return tuple(found for run in self._runs for found in run.found)

    def look_up(self, batch: Samples) -> None:
        for run in self._runs:
            if run.reads_batches:
                run.look_up(batch)

    def rows_here(self, path: str) -> RowsHere | None:
        found = (run.rows_here(path) for run in self._runs)
        return next((rows for rows in found if rows is not None), None)

    def tap(
        self, path: str, made: Tensor, read: Tensor, window: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        for run in self._runs:
            made = run.tap(path, made, read, window)
        return made

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        for run in self._runs:
            run.before_forward(call, ahead)
        for store in self._stores:
            store.before_forward(call, ahead)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        for run in self._runs:
            run.before_backward(call, ahead)
        for store in self._stores:
            store.before_backward(call, ahead)

    def close(self, call: int) -> None:
        for run in self._runs:
            run.close(call)
        for store in self._stores:
            store.close(call)

    def after_forward(self, call: int, last: bool) -> None:
        for run in self._runs:
            run.after_forward(call, last)

    def after_backward(self, call: int, last: bool) -> None:
        for run in self._runs:
            run.after_backward(call, last)

    def finish(self) -> None:
        for run in self._runs:
            run.finish()

    def arrived(self) -> Sequence[Tensor]:
        return [x for run in self._runs for x in run.arrived()]

    def stay_until_summed(self, names: Set[str]) -> None:
        for run in self._runs:
            run.stay_until_summed(names)

    def leave(self) -> None:
        for run in self._runs:
            run.leave()

    @property
    def on_host(self) -> list[Tensor]:
        return [x for run in self._runs for x in run.on_host]

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        return [x for run in self._runs for x in run.over_gradients(stepped)]

    def skipped(self) -> None:
        for run in self._runs:
            run.skipped()

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
