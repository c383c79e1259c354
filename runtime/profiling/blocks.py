"""Measures a block: its forward, its backward whole and in halves, and the memory it takes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import BlockRecord, Timing
from meshwright.ir.torch_modes import watching
from meshwright.ir.torch_private import on_gradient, storage_key
from meshwright.runtime.profiling.bench import BenchBlock, bench, layers_for
from meshwright.runtime.profiling.stopwatch import Stopwatch, watch_for
from meshwright.runtime.profiling.tasks import BlockTask
from meshwright.runtime.profiling.timings import mean, summarised
from meshwright.runtime.record.tensors import TensorTracker

Agree = Callable[[bool], bool]
"""Meets the other processes that measure the same; all get what the first of them says."""
_ROUNDS = (2, 200)
"""At least, at most."""
_RARELY = 2
"""Every so many rounds the backward is split and the forward runs without a graph."""


@dataclass
class _BlockTimes:
    """Seconds of single calls."""

    forward: list[float] = field(default_factory=list)
    no_grad: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    accumulating: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def measure_block(
    graph: Graph,
    task: BlockTask,
    device: torch.device,
    *,
    budget_s: float,
    processes: int = 1,
    agree: Agree = bool,
) -> BlockRecord:
    """The record of one process; all that measure at once take the same number of rounds."""
    maker = bench(graph, task, device)
    made = [maker.layer()]
    saved, workspace = memory_of(made[0])
    count = layers_for(made[0], saved, processes)
    made += [maker.layer() for _ in range(count - 1)]
    watch = watch_for(device)
    _warm_up(made, watch)
    ends = perf_counter() + budget_s
    seen, rounds = _BlockTimes(), 0
    while agree(rounds < _ROUNDS[0] or (rounds < _ROUNDS[1] and perf_counter() < ends)):
        _passes(made, watch, seen, agree)
        if rounds % _RARELY == 0:
            _halves(made, watch, seen, split=not task.compiled)
        rounds += 1
    return _record(task, seen, saved, workspace, processes)


def _warm_up(made: Sequence[BenchBlock], watch: Stopwatch) -> None:
    """Faults memory in, for all layers at once."""
    _forward(made, watch, [])
    for layer in reversed(made):
        watch.time(layer.backward)


def _passes(made: Sequence[BenchBlock], watch: Stopwatch, seen: _BlockTimes, agree: Agree) -> None:
    """Forward through all layers and back, as a stage does, without and with gradients there."""
    for layer in made:
        layer.forget_gradients()
    for backward in (seen.backward, seen.accumulating):
        _forward(made, watch, seen.forward)
        agree(True)
        for layer in reversed(made):
            backward.append(watch.time(layer.backward)[1])


def _halves(
    made: Sequence[BenchBlock], watch: Stopwatch, seen: _BlockTimes, *, split: bool
) -> None:
    if split:
        _forward(made, watch, seen.forward)
        for layer in reversed(made):
            seen.inputs.append(watch.time(layer.backward_input)[1])
        for layer in reversed(made):
            seen.weights.append(watch.time(layer.backward_weight)[1])
    for layer in made:
        seen.no_grad.append(watch.time(partial(layer.forward, keep=False))[1])


def _forward(made: Sequence[BenchBlock], watch: Stopwatch, seconds: list[float]) -> None:
    kept = []
    for layer in made:
        outputs, took = watch.time(layer.forward)
        kept.append(outputs)  # the next block reads them
        seconds.append(took)


def _record(
    task: BlockTask, seen: _BlockTimes, saved: int, workspace: int, processes: int
) -> BlockRecord:
    return BlockRecord(
        key=task.key,
        pattern=task.pattern,
        samples=task.samples,
        tp=task.tp,
        processes=processes,
        forward=summarised(seen.forward),
        backward=summarised(seen.backward),
        backward_input=summarised(seen.inputs) if seen.inputs else None,
        backward_weight=summarised(seen.weights) if seen.weights else None,
        no_grad_forward=summarised(seen.no_grad),
        accumulate=_more(seen.accumulating, seen.backward),
        saved_bytes=saved,
        workspace_bytes=workspace,
    )


def _more(longer: Sequence[float], shorter: Sequence[float]) -> Timing:
    """The difference of the quickest calls, which nothing disturbed; none if it is noise."""
    more = max(0.0, min(longer) - min(shorter))
    return Timing(median_s=more, spread=summarised(list(longer)).spread, count=len(longer))


def memory_of(layer: BenchBlock) -> tuple[int, int]:
    """(bytes that are kept for the backward, most beyond them at once)."""
    layer.forget_gradients()
    saved = _saved_bytes(layer)
    layer.backward()
    layer.forget_gradients()
    tracker = TensorTracker()
    tracker.label("parameters", layer.given)
    handles = on_gradient(layer.parameters, lambda p: tracker.label("gradients", [p.grad]))
    try:
        with watching(tracker.see):
            outputs = layer.forward()
            layer.backward()
        most = tracker.most("rest") + sum(x.nbytes for x in layer.gradients.values())
    finally:
        for handle in handles:
            handle.remove()
        tracker.stop()
    del outputs
    layer.forget_gradients()
    return saved, max(0, most - saved)


def _saved_bytes(layer: BenchBlock) -> int:
    """Of a forward: each storage once, without what was there before."""
    before = _keys(layer.given)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        layer.forward()
    storages = {storage_key(x): x.untyped_storage().nbytes() for x in kept}
    return sum(nbytes for key, nbytes in storages.items() if key not in before)


def _keys(tensors: Iterable[Tensor]) -> set[int]:
    return {storage_key(x) for x in tensors}


def merged(records: Sequence[BlockRecord]) -> BlockRecord:
    """What all processes say together."""
    first = records[0]

    def together(name: str) -> Timing:
        return mean([getattr(record, name) for record in records])

    def half(name: str) -> Timing | None:
        return None if getattr(first, name) is None else together(name)

    return BlockRecord(
        key=first.key,
        pattern=first.pattern,
        samples=first.samples,
        tp=first.tp,
        processes=first.processes,
        forward=together("forward"),
        backward=together("backward"),
        backward_input=half("backward_input"),
        backward_weight=half("backward_weight"),
        no_grad_forward=together("no_grad_forward"),
        accumulate=together("accumulate"),
        saved_bytes=max(record.saved_bytes for record in records),
        workspace_bytes=max(record.workspace_bytes for record in records),
    )
