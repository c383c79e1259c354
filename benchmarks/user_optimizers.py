"""Optimizers of libraries under ZeRO: equal to one process, or refused.

python -m benchmarks.user_optimizers [--libraries FOLDER] [--only torchao.optim ...]

For each optimizer, on two Gloo processes with zero 0 to 3: the largest difference of a parameter
after five steps from what one process makes, relative to the tensor's largest, or why the job
refuses; and what a search finds of it by trying, with the bytes of state that it predicts beside
those that a step is seen to hold. Libraries that are not installed are left out;
`pip install --no-deps --target FOLDER lion-pytorch pytorch-optimizer torchao bitsandbytes` is
enough. TORCHDYNAMO_DISABLE=1 spares torchao's compilation. bitsandbytes has no kernels for float64:
it runs in float32, where rounding of gradients moves 8-bit numbers.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.forms.updates import spoken
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.own_optimizers import BlockwiseMomentum, OwnLion
from meshwright.testing.spawn import RankFailed, alone, run_ranks

WIDTH, STEPS = 64, 5
LIBRARIES = {
    "lion_pytorch": ("Lion",),
    "pytorch_optimizer": (
        "Lion", "AdaBelief", "Adan", "Lamb", "Shampoo", "Prodigy", "ScheduleFreeAdamW",
    ),
    "torchao.optim": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "bitsandbytes.optim": ("Adam8bit", "Lion8bit", "Adam"),
    "torch.optim": ("Adafactor", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop"),
}  # fmt: skip
SINGLE = ("bitsandbytes.optim",)
Make = Callable[..., torch.optim.Optimizer]


def net(more: int, dtype: torch.dtype) -> nn.Module:
    """Two matrices of 64 by 256 and `more`: with 4 more, halves of them end within a block."""
    torch.manual_seed(0)
    inner = 4 * WIDTH + more
    layers = nn.Linear(WIDTH, inner), nn.LayerNorm(inner), nn.Tanh(), nn.Linear(inner, WIDTH)
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    both = torch.randn(2, 8, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return both[0], both[1]


def plan_of(zero: int, more: int, dtype: torch.dtype, optimizer: Any = "adamw") -> Plan:
    graph = trace(net(more, dtype), batch(0, dtype), F.mse_loss)
    precision = "fp64" if dtype is torch.float64 else "fp32"
    problem = make_problem(graph, Cluster.local(2), precision=precision, optimizer=optimizer)
    return build_plan(problem, uniform_choice(problem, dp_shard=2, zero=zero))


def by_job(make: Make, plan: Plan, more: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], int]:
    """Every rank calls this: parameters, and bytes of state."""
    job = compile_job(
        net(more, dtype), plan, loss_fn=F.mse_loss, optimizer=make, device="cpu", check=False,
        example_inputs=batch(0, dtype),
    )  # fmt: skip
    for step in range(STEPS - 1):
        job.step(batch(step, dtype))
    job.track_memory(batch(STEPS - 1, dtype))
    assert job.tensor_memory is not None
    return full_state(job), job.tensor_memory.optimizer_bytes


def plain(make: Make, more: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = net(more, dtype)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, dtype)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def row(make: Make, more: int, dtype: torch.dtype) -> Iterator[str]:
    """What each level makes, then the optimizer's figures and its state under zero 0."""
    wanted = alone(plain, make, more, dtype)
    state = 0
    for zero in range(4):
        try:
            found, held = run_ranks(2, by_job, make, plan_of(zero, more, dtype), more, dtype)[0]
        except RankFailed as error:
            last = str(error).strip().splitlines()[-1]
            yield "refused" if PlanError.__name__ in last else last[:60]
            continue
        state = state or held
        far = [(found[n] - x).abs().max() / x.abs().max() for n, x in wanted.items()]
        yield f"{float(max(far)):.0e}"
    try:
        plan = plan_of(0, more, dtype, make)
    except PlanError as error:
        yield from (str(error)[:60], "")
        return
    assert plan.predicted is not None
    yield plan.optimizer.removeprefix(f"tried {spoken(plan.optimizer)} ")
    yield f"{plan.predicted.stages[0].memory.optimizer_bytes:,} / {state:,}"


def makers(libraries: Sequence[str]) -> Iterator[tuple[str, Make, torch.dtype]]:
    """Those that can be imported."""
    yield from (("own Lion", OwnLion, torch.float64), ("own 8 bits", BlockwiseMomentum,
                                                       torch.float64))  # fmt: skip
    for library, names in ((one, LIBRARIES[one]) for one in libraries):
        try:
            module = import_module(library)
        except ImportError:
            print(f"{library} is not installed", file=sys.stderr)
            continue
        dtype = torch.float32 if library in SINGLE else torch.float64
        yield from ((f"{library}.{name}", getattr(module, name), dtype) for name in names)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--libraries", help="a folder that has some")
    parser.add_argument("--only", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    given = parser.parse_args()
    if given.libraries:
        sys.path.append(given.libraries)
    table = Table("optimizer", "rows", "0", "1", "2", "3", "found by trying", "state bytes")
    for name, make, dtype in makers(given.only):
        for more in (0, 4):
            table.add_row(name, str(4 * WIDTH + more), *row(make, more, dtype))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
