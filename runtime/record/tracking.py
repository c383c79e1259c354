"""The tracked step: counts live tensors by what they are to the job."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.forms.host_link import is_on_host, watching_rooms
from meshwright.ir.graph.experts import MADE_OF
from meshwright.ir.profile.measured import TensorMemory
from meshwright.ir.torch_modes import watching
from meshwright.ir.torch_private import on_gradient
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.record.tensors import TensorTracker, optimizer_tensors, tensors_of


@contextmanager
def tracking(
    parts: RankParts, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor]
) -> Iterator[list[TensorMemory]]:
    """The list gets the peak of what runs inside, the job's tensors from before included."""
    found: list[TensorMemory] = []
    tracker = TensorTracker(_wholes(parts))
    tracker.label("inputs", batch)
    _label(tracker, parts, optimizer)
    # Some gradients are gone when the step ends.
    trained = [p for p in _wholes(parts) if p.requires_grad]
    handles = on_gradient(trained, lambda p: tracker.label("gradients", [p.grad]))
    try:
        with (
            watching(tracker.see, MADE_OF),
            watching_rooms(lambda room: tracker.label("host", [room])),
        ):
            yield found
        _label(tracker, parts, optimizer)
        found.append(tracker.peak())
    finally:
        for handle in handles:
            handle.remove()
        tracker.stop()


@contextmanager
def tracking_cuda(
    parts: RankParts, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[list[TensorMemory]]:
    """As `tracking`, by torch's allocator: it rounds sizes up and sees the whole process."""
    found: list[TensorMemory] = []
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    parameters, gradients = _nbytes(_parameters(parts)), _nbytes(_gradients(parts))
    state = _nbytes(optimizer_tensors(optimizer))
    found.append(
        TensorMemory(
            peak_bytes=peak,
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=state,
            inputs_bytes=0,
            rest_bytes=peak - parameters - gradients - state,
            host_bytes=_nbytes(_on_host(parts, optimizer)),
        )
    )


def _label(tracker: TensorTracker, parts: RankParts, optimizer: torch.optim.Optimizer) -> None:
    tracker.label("parameters", _parameters(parts))
    tracker.label("gradients", _gradients(parts))
    tracker.label("optimizer", optimizer_tensors(optimizer))
    # As in predictions.
    tracker.label("gradients", [x for stage in parts.stages.values() for x in stage.sync.kept])
    tracker.label("host", _on_host(parts, optimizer))


def _on_host(parts: RankParts, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What lies in another memory than the device's: what links have made room for, and what an
    optimizer keeps of that."""
    for stage in parts.stages.values():
        yield from stage.sync.on_host
    for h in parts.held:
        if is_on_host(h.tensor):
            yield from tensors_of(optimizer.state.get(h.tensor, {}))


def _parameters(parts: RankParts) -> list[Tensor]:
    """Parameters and buffers as blocks read them and as the optimizer holds them."""
    read = [x for tensors in parts.tensors.values() for x in tensors.values()]
    return [*read, *(h.tensor for h in (*parts.held, *parts.reduced))]


def _gradients(parts: RankParts) -> list[Tensor]:
    return [x.grad for x in _parameters(parts) if x.grad is not None]


def _wholes(parts: RankParts) -> list[nn.Parameter]:
    found = [x for tensors in parts.tensors.values() for x in tensors.values()]
    return [x for x in found if isinstance(x, nn.Parameter)]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())
