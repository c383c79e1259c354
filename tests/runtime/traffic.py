"""What a training step reads and writes outside of products and attention, on a fake GPU: the
operators of a job, and those of plain PyTorch."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.codegen.lower.lower import lower
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.torch_modes import recording
from meshwright.ir.torch_private import storage_key
from meshwright.testing.fake_gpu.job import fake_gpu, fake_job

SAMPLES, LENGTH = 8, 1024
LEFT_OUT = (
    "mm", "linear", "scaled_dot_product", "dropped_attention", "empty", "detach", "prim",
    "fused_adam", "foreach",
)  # fmt: skip
"""Products, attention, what takes no time on a device, and the optimizer."""


class Traffic(NamedTuple):
    """Kernels by operator, and the bytes that they read and write."""

    kernels: Counter[str]
    nbytes: Counter[str]

    def beyond(self, other: "Traffic") -> tuple[int, int]:
        """Give how many kernels and bytes there are more than of another."""
        return (
            self.kernels.total() - other.kernels.total(),
            self.nbytes.total() - other.nbytes.total(),
        )


def of_job(plan: Plan, graph: Graph) -> Traffic:
    """Count a step of a job of one rank."""
    with fake_gpu(1, 0):
        job = fake_job(plan, graph, 0, lower(graph, plan, 0))

        def step() -> None:
            job.step({
                one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype))
                for one in plan.model.inputs
            })  # fmt: skip

        step()  # the first makes what all others use
        return _counted(step)


def of_plain(build: Callable[..., nn.Module], *args: Any) -> Traffic:
    """Count forward and backward of a model that has parameters in bfloat16."""
    with fake_gpu(1, 0):
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            model = build(*args).train()
            torch.set_default_dtype(torch.float32)
            ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
        return _counted(lambda: model(input_ids=ids, labels=ids).loss.backward())


def _counted(step: Callable[[], Any]) -> Traffic:
    found = Traffic(Counter(), Counter())

    def called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        name = str(func).rpartition(".")[0]
        if any(part in name for part in LEFT_OUT):
            return
        given, results = [*_on_device((args, kwargs))], [*_on_device(made)]
        keys = {storage_key(x) for x in given}
        if not func._schema.is_mutable and all(storage_key(x) in keys for x in results):
            return  # a view
        found.kernels[name] += 1
        found.nbytes[name] += sum(map(_nbytes, (*given, *results)))

    with recording(called):
        step()
    return found


def _on_device(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield from [x] if x.device.type == "cuda" else []
    elif isinstance(x, list | tuple):
        for part in x:
            yield from _on_device(part)
    elif isinstance(x, Mapping):
        yield from _on_device([*x.values()])


def _nbytes(x: Tensor) -> int:
    """Of what there is once."""
    once = [size for size, step in zip(x.shape, x.stride(), strict=True) if step]
    return prod(once) * x.element_size()
