"""What records a region once and replays it: a CUDA graph on a GPU, operators one by one on a CPU.

Both have the same rules. What is recorded reads and writes the tensors that it had when it was
recorded, whatever Python says later; numbers of Python are those of that time; the host reads
nothing of it. What a region makes and nobody outside holds is overwritten by other regions: they
share one pool of memory.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

from meshwright.ir.errors import PlanError
from meshwright.runtime.capture.operators import OperatorTape

Replay = Callable[[], None]
T = TypeVar("T")


class LaunchRecorder(Protocol):
    """Records regions of one job, whose replays never overlap."""

    def record(self, region: Callable[[], T]) -> tuple[Replay, T]:
        """Runs a region, in effect once; what comes back runs it again, and what it returned, which
        each replay writes anew."""


class CudaRecorder:
    """CUDA graphs that share a pool of memory and a stream to record in."""

    def __init__(self) -> None:
        self._shared: tuple[Any, Any] | None = None
        """The pool and the stream; made when they are needed, as tensors may be fake."""

    def record(self, region: Callable[[], T]) -> tuple[Replay, T]:
        """Other threads may use the device meanwhile: those of NCCL and of saves do."""
        cuda: Any = torch.cuda
        if self._shared is None:
            self._shared = cuda.graph_pool_handle(), cuda.Stream()
        pool, stream = self._shared
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            made = region()
        graph.replay()
        return graph.replay, made


class OperatorRecorder:
    """The same on a CPU, where it saves nothing: so that what GPUs do can be tried without one."""

    def __init__(self) -> None:
        self._tapes: WeakSet[OperatorTape] = WeakSet()

    def record(self, region: Callable[[], T]) -> tuple[Replay, T]:
        tape = OperatorTape(self._tapes)
        with tape.recording():
            made = region()
        tape.close()
        return tape.replay, made


TAPES = False
"""Whether jobs on CPUs record, too: tests say so. Else calls run there as they are."""


def recorder_of(device: torch.device, *, by_nccl: bool) -> LaunchRecorder | None:
    """Returns what records regions on a device, None where they run as they are; PlanError where
    they cannot be. `by_nccl`: ranks of the job meet by NCCL, if they do."""
    if device.type == "cuda" and not by_nccl:
        raise PlanError(
            "capture true: collectives of GPUs are recorded where they go by NCCL, and this job's "
            "go through the host; nearest is capture false"
        )
    if device.type == "cuda":
        return CudaRecorder()
    if device.type == "cpu":
        return OperatorRecorder() if TAPES else None
    raise PlanError(
        f"capture true: calls of blocks are recorded on GPUs of CUDA, and this is a {device.type} "
        "device; nearest is capture false"
    )
