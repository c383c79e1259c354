"""Times optimizer steps as the runtime takes them, over few large and over many small tensors."""

from collections.abc import Callable
from time import perf_counter

import psutil
import torch
from torch import nn

from meshwright.forms.running import Held
from meshwright.ir.graph.graph import Kind
from meshwright.ir.graph.param import Param
from meshwright.ir.layout.nesting import whole_runs
from meshwright.ir.profile.profile import OptimizerRecord
from meshwright.runtime.profiling.stopwatch import watch_for
from meshwright.runtime.profiling.tasks import OptimizerTask
from meshwright.runtime.profiling.timings import summarised
from meshwright.runtime.step.optimizer import make_optimizer

_ITEM = torch.float32.itemsize
_LEAST, _MOST = 5, 100
POINTS = (
    (4, 2**14), (64, 2**18), (256, 2**20), (16, 2**22), (4, 2**24), (128, 2**26), (16, 2**28),
)  # fmt: skip
"""(tensors, bytes in all)"""


def optimizer_tasks(optimizer: str, free_bytes: int) -> list[OptimizerTask]:
    """Points that fit in memory with gradients and state."""
    return [
        OptimizerTask(optimizer=optimizer, num_tensors=count, nbytes=nbytes)
        for count, nbytes in POINTS
        if 8 * nbytes < free_bytes
    ]


def free_bytes(device: torch.device, processes: int) -> int:
    """Memory that one of the processes may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available // processes)


def measure_optimizer(
    task: OptimizerTask,
    device: torch.device,
    *,
    budget_s: float,
    agree: Callable[[bool], bool] = bool,
) -> OptimizerRecord:
    """Steps over tensors of equal size, whose gradients are there."""
    held = [_held(task, device) for _ in range(task.num_tensors)]
    optimizer = make_optimizer(task.optimizer, held, 1e-6, nn.Module())
    watch = watch_for(device)
    seconds: list[float] = []
    optimizer.step()  # makes the state
    ends = perf_counter() + budget_s
    while agree(len(seconds) < _LEAST or (len(seconds) < _MOST and perf_counter() < ends)):
        seconds.append(watch.time(optimizer.step)[1])
    return OptimizerRecord(
        optimizer=task.optimizer,
        num_tensors=task.num_tensors,
        nbytes=task.nbytes,
        time=summarised(seconds[1:]),
    )


def _held(task: OptimizerTask, device: torch.device) -> Held:
    numel = task.nbytes // task.num_tensors // _ITEM
    tensor = nn.Parameter(torch.randn(numel, device=device))
    tensor.grad = torch.randn(numel, device=device)
    param = Param("p", "p", Kind.PARAMETER, (numel,), "float32", True, (), whole_runs((numel,)), ())
    return Held(param, 0, tensor, None, True)
