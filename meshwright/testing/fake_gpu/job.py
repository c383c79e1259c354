"""A job on GPUs that are not there: tensors have shapes and devices but no memory, collectives have
no peers, events and streams do nothing. What would make the host wait for the device is noted, and
what two streams, or one and the host, do to one memory in no order (`streams.py`).

On tensors without memory torch refuses an operator whose operands lie on two devices, but for a
number or places of the host's, which are noted here; and one that reads a value on the host, so
that neither can pass unseen. Launches of Triton do not happen: of the operators around them there
are the shapes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.codegen.lower.lower import lower
from meshwright.codegen.lower.program import StageProgram
from meshwright.forms import host_link
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.kernels.bucket_update import SENT
from meshwright.ir.placed import used
from meshwright.ir.plan.plan import Plan
from meshwright.ir.torch_fake import fake_world
from meshwright.ir.torch_modes import recording
from meshwright.ir.torch_private import fake_mode, leaves, storage_key, updates_without_memory
from meshwright.runtime.job import job as job_file
from meshwright.runtime.job.build import build_rank
from meshwright.runtime.job.job import Job
from meshwright.runtime.record.late import LateNumber
from meshwright.runtime.step.optimizer import make_optimizer
from meshwright.runtime.step.planned_updates import planned_choice
from meshwright.runtime.step.updates import FormOptimizer
from meshwright.testing.fake_gpu.emitted import host_tensors
from meshwright.testing.fake_gpu.process import Calls, Seen
from meshwright.testing.fake_gpu.streams import FakeEvent, FakeStream, Streams, on_its_own_stream

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
_READS = ("aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero", "aten.equal")
_COPIES = ("aten._to_copy", "aten.copy_")
_MAKES = ("aten.new_", "aten.empty_like", "aten.zeros_like", "aten.ones_like", "aten.full_like")
"""What takes of its operand a type and a shape, not its values."""
_COLLECTIVES = (
    "allreduce", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base",
    "alltoall", "alltoall_base", "broadcast", "send", "recv",
)  # fmt: skip


@dataclass
class Waits:
    """What the host would have waited for."""

    step: int = 0
    """Whoever drives the job counts its steps here."""
    found: list[str] = field(default_factory=list)
    """Waits for what the device does in the step itself."""
    late: int = 0
    """Waits for what it did in the step before."""
    pinned: set[int] = field(default_factory=set)
    """Keys of what stands for pinned memory."""
    kept: list[Tensor] = field(default_factory=list)
    """Tensors of it, so that no other memory gets the key of one."""
    streams: Streams = field(default_factory=Streams)
    mixed: list[str] = field(default_factory=list)
    """Operators other than copies with operands of the host and of the device."""
    operators: int = 0
    """What the host has called."""
    launches: int = 0
    """Those that the device has to do something for."""
    messages: int = 0
    """Collectives and messages among them."""

    def begin(self, step: int) -> None:
        """From here on it is another step, whose calls are counted."""
        self.step = step
        self.operators = self.launches = self.messages = 0

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """An operator of torch; not what it asks a fake tensor where a real one knows itself."""
        if func is torch.ops.prim.device.default:
            return
        name = str(func).rpartition(".")[0]
        self.operators += 1
        if self.streams.called(func, args, kwargs, made):
            self.launches += 1
            self.messages += name.startswith("c10d.")
        if kwargs.get("pin_memory"):
            self.pinned.add(storage_key(made))
            self.kept.append(made)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in _READS and any(x.device.type == "cuda" for x in given):
            self.found.append(name)
            self.streams.host_waits()
        if name in _COPIES and isinstance(made, Tensor):
            source = args[1] if name == "aten.copy_" else args[0]
            if {source.device.type, made.device.type} == {"cpu", "cuda"}:
                self._copied(name, source, made, args, kwargs)
        elif not name.startswith(_MAKES):
            ours = name.startswith("meshwright.")
            named = zip(func._schema.arguments, args, strict=False)
            sent = [x for argument, x in named if ours and argument.name == SENT]
            given = [x for x in leaves((args, kwargs, made)) if isinstance(x, Tensor)]
            self._mix(name, [x for x in given if not any(x is y for y in sent)])

    def _mix(self, name: str, operands: Sequence[Tensor]) -> None:
        host = next((x for x in operands if x.device.type == "cpu"), None)
        if host is not None and any(x.device.type == "cuda" for x in operands):
            self.mixed.append(f"{name} with {list(host.shape)} of the host")

    def _copied(
        self,
        name: str,
        source: Tensor,
        made: Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        waits = not (kwargs.get("non_blocking") or (name == "aten.copy_" and True in args[2:]))
        host = source if source.device.type == "cpu" else made
        # Torch pins by itself what it copies to a new tensor of the host without a wait. What has
        # gaps, or is of another type, goes by memory that is not pinned.
        pinned = storage_key(host) in self.pinned or (name == "aten._to_copy" and host is made)
        pinned &= host.dtype is (made if host is source else source).dtype and _is_dense(host)
        if waits:
            self.streams.host_waits()
        if waits or not pinned:
            shape = list(source.shape)
            self.found.append(f"{name} of {shape} from {source.device.type} to {made.device.type}")

    def number(self, x: Tensor) -> float:
        """In place of `Tensor.__float__`: the host may read what it has itself."""
        if x.device.type == "cuda":
            self.found.append("float() of a tensor")
            self.streams.host_waits()
        return 1.0


def _is_dense(x: Tensor) -> bool:
    """Whether its elements fill the memory from the first to the last."""
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return not x.numel() or span == x.numel()


class _FakeEvent(FakeEvent):
    """A moment on the device, in a step."""

    waits: Waits

    def record(self, stream: FakeStream | None = None) -> None:
        super().record(stream)
        self.step = self.waits.step

    def synchronize(self) -> None:
        super().synchronize()
        if self.step < self.waits.step:
            self.waits.late += 1
        else:
            self.waits.found.append("an event of the step itself")


@contextmanager
def _nothing(*_: object) -> Iterator[None]:
    yield


@contextmanager
def fake_gpu(world_size: int, rank: int) -> Iterator[Waits]:
    """Inside, this process is a rank with a GPU. What would wait for the device is in what comes
    back, from the first operator on."""
    waits = Waits()
    streams = waits.streams
    event = type("FakeEvent", (_FakeEvent,), {"waits": waits, "streams": streams})
    stream: Any = type("FakeStream", (FakeStream,), {"streams": streams, "event": event})

    def waited(*_: object) -> None:
        waits.found.append("torch.cuda.synchronize")
        streams.host_waits()

    def value(number: LateNumber) -> float:
        held = number._event
        if held is not None:
            held.synchronize()
        return 1.0

    doubles: list[Any] = [
        patch.object(torch, "Event", event), patch.object(torch.cuda, "Event", event),
        patch.object(torch.cuda, "Stream", stream),
        patch.object(torch.cuda, "stream", lambda x: streams.on(x.number)),
        patch.object(torch.cuda, "current_stream", stream.current),
        patch.object(torch.cuda, "synchronize", waited),
        patch.object(torch.cuda, "get_device_capability", lambda _: CAPABILITY),
        patch.object(Tensor, "__float__", lambda x: waits.number(x), create=True),
        patch.object(Tensor, "record_stream", lambda x, at: streams.keep(
            [x], at.number, asked=True)),
        patch.object(LateNumber, "__float__", value),
        patch.object(job_file, "Failures", _NoFailures),
        patch.object(job_file, "check_same_batches", _nothing),
        patch.object(torch.accelerator, "current_accelerator", _no_device),
        patch.object(torch.accelerator, "is_available", lambda: False),
        patch.dict(host_link._links, clear=True),  # of another fake GPU, with its streams
        *(patch.object(dist.ProcessGroup, name, on_its_own_stream(
            streams, getattr(dist.ProcessGroup, name))) for name in _COLLECTIVES),
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(fake_world(world_size, rank))
        for double in doubles:
            stack.enter_context(double)
        stack.enter_context(updates_without_memory())
        stack.enter_context(fake_mode())
        stack.enter_context(recording(waits.called))
        yield waits


def _no_device(check_available: bool = False) -> None:
    return None


class _NoFailures:
    """Nobody watches ranks that are not there."""

    def __init__(self, *_: object) -> None:
        return

    def guard(self) -> Any:
        return _nothing()

    def close(self) -> None:
        return


def fake_job(
    plan: Plan, graph: Graph, rank: int, programs: tuple[StageProgram, ...]
) -> Job:  # fmt: skip
    """Makes a rank's job, inside `fake_gpu`."""
    weights = {
        x.fqn: torch.empty(x.shape, dtype=getattr(torch, x.dtype), device="meta")
        for x in graph.tensors.values() if x.kind in (Kind.PARAMETER, Kind.BUFFER)
    }  # fmt: skip
    parts = build_rank(plan, graph, programs, weights, rank, GPU, 0, shared=False)
    by_kernel = "bucket_update" in used(plan)
    optimizer = make_optimizer(
        planned_choice(plan), parts.held, None, torch.nn.Module(), by_kernel=by_kernel
    )
    if isinstance(optimizer, FormOptimizer):
        optimizer.write_over(stage.sync for stage in parts.stages.values())
    job = Job(plan, graph, parts, optimizer, torch.nn.Module(), GPU, plan.max_grad_norm)
    job.missing.clear()
    return job


def _be_careless(loss: Tensor) -> None:
    """What a loop is not to do: read on a stream that has waited for nothing, let go of what a
    stream is at, read on the host, copy from memory that is not pinned, and take numbers and places
    of the host."""
    gone = loss * 3
    beside: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        loss.exp()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        gone.sin()
    del gone
    float(loss)
    torch.ones(3).to(GPU, non_blocking=True)
    loss.expand(4).mul(torch.ones(()))[torch.arange(2)]


def steps(plan: Plan, graph: Graph, rank: int, count: int, *, careless: bool = False) -> Seen:
    """Takes steps of one rank, each with the next batch ahead; what the first waits for, which
    makes what all others use, is left out. `careless`: a user's loop does what waits."""
    programs = lower(graph, plan, rank, "cuda")
    with fake_gpu(plan.world_size, rank) as waits:
        job = fake_job(plan, graph, rank, programs)

        def batch() -> dict[str, Tensor]:
            """As where labels are `ids[:, 1:]`: what a sample has is a part of what lies there."""
            return {
                i.name: torch.zeros(*i.shape[:-1], i.shape[-1] + 1, dtype=getattr(torch, i.dtype))[
                    ..., 1:
                ]
                for i in plan.model.inputs
            }

        following = batch()
        for number in range(count):
            waits.begin(number)
            given, following = following, batch()
            loss = job.step(given, next_batch=following)
            if not number:
                waits.found.clear()
                waits.mixed.clear()
            elif careless:
                _be_careless(loss)
        waits.streams.stop()
    calls = Calls(waits.operators, waits.launches, waits.messages)
    found, streams = tuple(waits.found), waits.streams
    mixed = (*host_tensors(programs), *dict.fromkeys(waits.mixed))
    return Seen(found, waits.late, tuple(streams.races), tuple(streams.late), mixed, calls)
