"""What the runtime costs on a CPU beside ops: seconds per step, per action and per block.

python benchmarks/overheads.py

Steps of a stack of tiny layers in this process with 1 and 16 micro-batches and with 4 and 24
blocks, less what the same layers take in plain PyTorch. Processor seconds of the only thread.
"""

from statistics import median
from time import thread_time

import torch
from torch import nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job

WIDTH, SAMPLES, STEPS = 8, 16, 60
FEW_BLOCKS, MANY_BLOCKS = 4, 24
MANY_MICROBATCHES = 16


class Stack(nn.Module):
    """Blocks of one layer."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()


class WithLoss(nn.Module):
    """As a model that returns its loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stack = Stack(blocks)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.stack(x, y)}


def step_s(blocks: int, microbatches: int) -> float:
    """Of the job."""
    batch = {"x": torch.randn(SAMPLES, WIDTH), "y": torch.randn(SAMPLES, WIDTH)}
    model = WithLoss(blocks)
    graph = trace(model, batch)
    problem = make_problem(graph, Cluster.local(1), optimizer="sgd", precision="fp32")
    plan = build_plan(problem, uniform_choice(problem, num_microbatches=microbatches))
    job = compile_job(model, plan, graph=graph, check=False)
    found = _median(lambda: job.step(batch))
    job.close()
    return found


def plain_s(blocks: int, microbatches: int) -> float:
    """Of plain PyTorch."""
    model = WithLoss(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    parts = [torch.randn(SAMPLES // microbatches, WIDTH) for _ in range(microbatches)]

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            model(part, part)["loss"].backward()
        optimizer.step()

    return _median(step)


def _median(step: object) -> float:
    found = []
    for _ in range(STEPS):
        start = thread_time()
        step()  # type: ignore[operator]
        found.append(thread_time() - start)
    return median(found[STEPS // 3 :])


def main() -> None:
    torch.set_num_threads(1)
    more = {
        (b, m): step_s(b, m) - plain_s(b, m)
        for b in (FEW_BLOCKS, MANY_BLOCKS)
        for m in (1, MANY_MICROBATCHES)
    }
    # Two actions per micro-batch, and each block is in both.
    actions = 2 * (MANY_MICROBATCHES - 1)
    few = (more[FEW_BLOCKS, MANY_MICROBATCHES] - more[FEW_BLOCKS, 1]) / actions
    many = (more[MANY_BLOCKS, MANY_MICROBATCHES] - more[MANY_BLOCKS, 1]) / actions
    block_s = (many - few) / (MANY_BLOCKS - FEW_BLOCKS)
    action_s = few - FEW_BLOCKS * block_s
    step = more[FEW_BLOCKS, 1] - 2 * (action_s + FEW_BLOCKS * block_s)
    print(f"block {block_s * 1e6:.0f} us, action {action_s * 1e6:.0f} us, step {step * 1e6:.0f} us")


if __name__ == "__main__":
    main()
