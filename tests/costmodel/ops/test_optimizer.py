"""What an optimizer's step makes besides its state, against what torch really makes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel.memory.memory import optimizer_traffic
from meshwright.costmodel.ops.optimizer import optimizer_time, temporary_bytes
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.presets import cpu_process, device

SHAPES = [(64, 32), (128, 8), (50,)]
BYTES = [4 * torch.Size(shape).numel() for shape in SHAPES]


class _Made(TorchDispatchMode):
    """Most bytes that one op returns in new tensors."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        found = result if isinstance(result, (list, tuple)) else [result]
        known = {id(x) for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])}
        new = [x for x in found if isinstance(x, Tensor) and id(x) not in known]
        self.most = max(self.most, sum(x.nbytes for x in new))
        return result


def made(kind: type[torch.optim.Optimizer], **settings: bool) -> int:
    """In the second step: the first one makes the state."""
    tensors = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = kind(tensors, **settings)  # type: ignore[call-arg]
    for _ in range(2):
        for x in tensors:
            x.grad = torch.ones_like(x)
        with _Made() as mode:
            optimizer.step()
    return mode.most


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)],
)
def test_fused_steps_make_nothing(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert made(kind, fused=True) <= 8  # a step count
    assert temporary_bytes(device("h200"), name, sum(BYTES), max(BYTES)) == 0


def test_rmsprop_makes_roots() -> None:
    gpu, cpu = device("h200"), cpu_process(1 << 30)
    assert made(torch.optim.RMSprop, foreach=True) == sum(BYTES)
    assert temporary_bytes(gpu, "rmsprop", sum(BYTES), max(BYTES)) == sum(BYTES)
    assert made(torch.optim.RMSprop, foreach=False) == max(BYTES)
    assert temporary_bytes(cpu, "rmsprop", sum(BYTES), max(BYTES)) == max(BYTES)


def test_cpus_take_longer_for_what_is_not_fused() -> None:
    """Kernel by kernel on tensor by tensor, and each makes what it returns anew: at the rate of
    other ops, where a fused one has all that memory has."""
    cpu = cpu_process(1 << 30)

    def seconds(optimizer: str, tensors: int, nbytes: int) -> float:
        return optimizer_time(cpu, optimizer, tensors, nbytes).seconds

    rate, share = cpu.memory_bandwidth_bytes_per_s, cpu.efficiency[OpClass.ELEMENTWISE]
    for optimizer, dispatches in (("adamw", 0.5), ("sgd", 0.5), ("rmsprop", 1.2), ("muon", 1.6)):
        each = seconds(optimizer, 2, 4) - seconds(optimizer, 1, 4)
        assert each == pytest.approx(dispatches * cpu.overhead_s)
    for optimizer, speed in (("adamw", rate), ("rmsprop", rate * share)):
        moved = seconds(optimizer, 1, 1 << 20) - seconds(optimizer, 1, 4)
        wanted = (optimizer_traffic(1 << 20, optimizer) - optimizer_traffic(4, optimizer)) / speed
        assert moved == pytest.approx(wanted)
