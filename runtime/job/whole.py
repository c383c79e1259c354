"""Between the whole tensors of a model and the parts of them that ranks hold."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.running import Held
from meshwright.ir.comm.by_store import of_all
from meshwright.ir.graph.graph import Kind
from meshwright.ir.graph.graph import Tensor as GraphTensor
from meshwright.ir.precision import stepped_in
from meshwright.runtime.checkpoint.shard_boxes import pieces

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job

_TOGETHER_BYTES = 4 << 20
"""Of small tensors that are sent as one."""


def whole_parameters(
    job: "Job", *, everyone: bool = False, trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Module path and whole tensor, on the job's device, one at a time (small ones up to
    `_TOGETHER_BYTES` at once); every rank goes on.

    Only rank 0 gets the values, unless they are for `everyone`. `trained`: of those alone.
    """
    job.parts.settle()
    values = [(h, _itself(h)) for h in job.parts.held]
    yield from _put_together(job, values, everyone, trained)


def whole_gradients(job: "Job") -> Iterator[tuple[str, Tensor]]:
    """The same of gradients, between a step's last backward and its update, for rank 0."""
    _spread(job)
    yield from _put_together(job, [(h, h.tensor.grad) for h in job.parts.reduced], False)


def _spread(job: "Job") -> None:
    """Gradients are there of all rows."""
    for stage in job.parts.stages.values():
        stage.sync.spread()


def _itself(held: Held) -> Tensor:
    return held.tensor.detach()


def _put_together(
    job: "Job",
    values: Sequence[tuple[Held, Tensor | None]],
    everyone: bool,
    trained: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of what ranks have of it; None counts as zeros."""
    ours = {id(h) for h in job.parts.counted(h for h, _ in values)}
    counted: dict[str, list[tuple[Held, Tensor | None]]] = {}
    for h, value in values:
        if id(h) in ours:
            counted.setdefault(h.param.name, []).append((h, value))
    asked = (t for t in _of_job(job, Kind.PARAMETER) if t.requires_grad or not trained)
    yield from _summed(((t.fqn, _laid(t, job, counted.get(t.name, []))) for t in asked),
                       job.plan.world_size, everyone)  # fmt: skip


def _laid(tensor: GraphTensor, job: "Job", values: Sequence[tuple[Held, Tensor | None]]) -> Tensor:
    """What this rank has of a parameter, in its place of the whole; zeros elsewhere."""
    whole = _room(tensor, job)
    for h, value in values:
        if value is not None:
            for piece in pieces(h.param.runs, h.rows):
                piece.of_global(whole).copy_(piece.of_local(value))
    return whole


def whole_buffers(job: "Job", *, everyone: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The same for buffers, as the first rank that reads them has them."""
    job.parts.settle()
    ours = ((t.fqn, _owned(t, job)) for t in _of_job(job, Kind.BUFFER))
    yield from _summed(ours, job.plan.world_size, everyone)


def _owned(tensor: GraphTensor, job: "Job") -> Tensor:
    """A buffer on the rank that it is taken from; zeros elsewhere."""
    whole, parts = _room(tensor, job), job.parts
    if parts.owners[tensor.name] == parts.rank:
        whole.copy_(parts.any_tensor(tensor.name))
    return whole


def without_gradient(job: "Job") -> frozenset[str]:
    """Module paths of the parameters that got no gradient on any rank; the same on every rank."""
    _spread(job)
    mine = {h.param.fqn: True for h in job.parts.held if h.tensor.numel()}
    reached = [h for h in job.parts.reduced if h.tensor.numel() and h.tensor.grad is not None]
    everyone = of_all(mine | dict.fromkeys((h.param.fqn for h in reached), False))
    known = {fqn for found in everyone for fqn in found}
    return frozenset(fqn for fqn in known if all(found.get(fqn, True) for found in everyone))


def write_parameters(
    job: "Job", change: Callable[[str, Tensor], Tensor], *, trained: bool = False
) -> None:
    """Each parameter, or each that is trained, becomes what `change(path, whole)` makes of it, the
    same on every rank."""
    changed = {}
    for fqn, whole in whole_parameters(job, everyone=True, trained=trained):
        for h in job.parts.held:
            if h.param.fqn == fqn:
                changed[id(h)] = h, change(fqn, whole)
    for h, whole in changed.values():
        for piece in pieces(h.param.runs, h.rows):
            piece.of_local(h.tensor.detach()).copy_(piece.of_global(whole))
    for stage in job.parts.stages.values():
        stage.sync.written()


def differing_copies(job: "Job", rounding: float) -> tuple[str, ...]:
    """Module paths of what two ranks hold differently; the same on every rank."""
    found = set()
    for fqn, whole in whole_parameters(job, everyone=True):
        for h in job.parts.held:
            if h.param.fqn == fqn and not all(
                _near(piece.of_local(_itself(h)), piece.of_global(whole), rounding)
                for piece in pieces(h.param.runs, h.rows)
            ):
                found.add(fqn)
    for fqn, whole in whole_buffers(job, everyone=True):
        if not all(_near(x, whole, rounding) for x in _buffers(job, fqn)):
            found.add(fqn)
    return tuple(sorted(frozenset[str]().union(*of_all(frozenset(found)))))


def _buffers(job: "Job", fqn: str) -> Iterator[Tensor]:
    """What the stages of this rank have under a path."""
    for index, stage in job.parts.stages.items():
        for param in stage.program.params:
            if param.fqn == fqn and param.kind is Kind.BUFFER:
                yield job.parts.tensors[index][param.name]


def _near(found: Tensor, wanted: Tensor, rounding: float) -> bool:
    if not wanted.numel():
        return True
    exact = not wanted.is_floating_point() and not wanted.is_complex()
    size = float(wanted.abs().max()) if not exact else 0.0
    return torch.allclose(found, wanted, rtol=0.0, atol=rounding * size, equal_nan=True)


def _of_job(job: "Job", kind: Kind) -> Iterator[GraphTensor]:
    for tensor in job.graph.tensors.values():
        if tensor.kind is kind and tensor.name in job.parts.owners:
            yield tensor


def _room(tensor: GraphTensor, job: "Job") -> Tensor:
    dtype = getattr(torch, stepped_in(job.plan.precision, tensor))
    return torch.zeros(tensor.shape, dtype=dtype, device=job.device)


def _summed(
    values: Iterable[tuple[str, Tensor]], world_size: int, everyone: bool
) -> Iterator[tuple[str, Tensor]]:
    """The sums over ranks; each element is nonzero on one rank only.

    Small tensors that follow each other are sent as one: a message costs more than what is in it.
    """
    if world_size == 1:
        yield from values
        return
    for group in _groups(values):
        for dtype in dict.fromkeys(x.dtype for _, x in group):
            _sum([x for _, x in group if x.dtype is dtype], everyone)
        yield from group


def _groups(values: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors of `_TOGETHER_BYTES` at most, or a larger one alone before the next one is made."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, x in values:
        if group and size + x.nbytes > _TOGETHER_BYTES:
            yield group
            group, size = [], 0
        group.append((name, x))
        size += x.nbytes
        if size >= _TOGETHER_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _sum(wholes: Sequence[Tensor], everyone: bool) -> None:
    """Makes tensors of one dtype their sums."""
    sent = wholes[0] if len(wholes) == 1 else torch.cat([x.flatten() for x in wholes])
    sendable = sent.to(torch.uint8) if sent.dtype is torch.bool else sent
    if everyone:
        dist.all_reduce(sendable)
    else:
        dist.reduce(sendable, dst=0)
    if sendable is not wholes[0]:
        parts = torch.split(sendable.flatten(), [x.numel() for x in wholes])
        for x, part in zip(wholes, parts, strict=True):
            x.copy_(part.view(x.shape))
