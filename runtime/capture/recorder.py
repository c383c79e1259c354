"""What records a region once and replays it: a CUDA graph on a GPU, operators one by one on a CPU.

Both have the same rules. What is recorded reads and writes the tensors that it had when it was
recorded, whatever Python says later; numbers of Python are those of that time; nothing of it is read
by the host. What a region makes and nobody outside holds is overwritten by other regions: they share
one pool of memory.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from meshwright.ir.errors import PlanError
from meshwright.runtime.capture.operators import OperatorTape

Replay = Callable[[], None]
T = TypeVar("T")


class Recorder(Protocol):
    """Records regions of one job, whose replays never overlap."""

    def record(self, region: Callable[[], T]) -> tuple[Replay, T]:
        """Runs a region, in effect once; what comes back runs it again, and what it returned, which
        each replay writes anew."""


class CudaRecorder:
    """CUDA graphs that share a pool of memory and a stream to record in."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream()

    def record(self, region: Callable[[], T]) -> tuple[Replay, T]:
        """Other threads may use the device meanwhile: those of NCCL and of saves do."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            made = region()
        graph.replay()  # type: ignore[no-untyped-call]
        return graph.replay, made


class OperatorRecorder:
    """The same on a CPU, where it saves nothing: so that what GPUs do can be tried without one."""

    def record(self, region: Callable[[], T]) -> tuple[Replay, T]:
        tape = OperatorTape()
        with tape.recording():
            made = region()
        tape.close()
        return tape.replay, made


def recorder_of(device: torch.device) -> Recorder:
    """Returns what records regions on a device; PlanError where nothing does."""
    if device.type == "cuda":
        return CudaRecorder()
    if device.type == "cpu":
        return OperatorRecorder()
    raise PlanError(
        f"capture true: calls of blocks are recorded on GPUs of CUDA, and this is a {device.type} "
        "device; nearest is capture false"
    )
