"""A small chain of blocks lowered by hand, so that the runtime is tested without the compiler.

Block 0 makes `e` from the input; each block makes the next `h` from the last; the final block also
reads `e` (relayed through all stages) and the first block's weight (tied), and gives the loss.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from meshwright.codegen.lower.program import BlockCode, BorderValue, Call, StageProgram
from meshwright.forms.retention import whole_form
from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.graph.graph import Tensor as GraphTensor
from meshwright.ir.graph.param import Param
from meshwright.ir.layout.layout import Shard
from meshwright.ir.layout.nesting import whole_runs
from meshwright.ir.plan.plan import ClusterId, InputSpec, ModelId, Plan, ScheduleTable, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.runtime.job.build import build_rank
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.weights import model_tensors
from meshwright.runtime.step.optimizer import make_optimizer

WIDTH = 6
BATCH = 24


class Chain(nn.Module):
    """`blocks` linear layers; odd sizes of the batch are no problem to it."""

    def __init__(self, blocks: int, tied: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 3)
            for _ in range(blocks - tied)
        )
        self.biases = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64))
            for _ in range(blocks)
        )
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.num_blocks, self.tied = blocks, tied

    def weight(self, block: int) -> int:
        """Index of the weight that a block reads."""
        return 0 if self.tied and block == self.num_blocks - 1 else block

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        e = h = torch.tanh(x @ self.weights[0].t() + self.biases[0]) * self.gain
        for block in range(1, self.num_blocks - 1):
            h = torch.tanh(h @ self.weights[block].t() + self.biases[block])
        last = self.num_blocks - 1
        out = h @ self.weights[self.weight(last)].t() + self.biases[last] + e
        return ((out - y) ** 2).sum() / BATCH


class _First(nn.Module):
    def forward(self, comm, weight, bias, gain, x):
        return (torch.tanh(x @ weight.t() + bias) * gain,)


class _Middle(nn.Module):
    def forward(self, comm, weight, bias, h):
        return (torch.tanh(h @ weight.t() + bias),)


class _Last(nn.Module):
    def forward(self, comm, weight, bias, h, e, y):
        return (((h @ weight.t() + bias + e - y) ** 2).sum() / BATCH,)


def graph_of(chain: Chain) -> Graph:
    shape = (BATCH, WIDTH)
    tensors = {
        "x": GraphTensor("x", shape, "float64", Kind.INPUT),
        "y": GraphTensor("y", shape, "float64", Kind.INPUT),
        "loss": GraphTensor("loss", (), "float64", Kind.ACTIVATION, requires_grad=True),
    }
    for fqn, p in chain.named_parameters():
        name = fqn.replace(".", "_")
        tensors[name] = GraphTensor(
            name, tuple(p.shape), "float64", Kind.PARAMETER, fqn, p.requires_grad
        )
    blocks = []
    for i in range(chain.num_blocks):
        params = (f"weights_{chain.weight(i)}", f"biases_{i}") + ("gain",) * (i == 0)
        pattern = "first" if i == 0 else "last" if i == chain.num_blocks - 1 else "middle"
        inputs = {"first": ("x",), "middle": (f"h{i - 1}",), "last": (f"h{i - 1}", "h0", "y")}
        out = "loss" if pattern == "last" else f"h{i}"
        blocks.append(Block(f"b{i}", pattern, pattern, 0, 0, inputs[pattern], (out,), params))
    return Graph(
        tensors, (), 0, tuple(blocks), ("x", "y"), ("0", "1"), "loss", BATCH, ("x", "y"),
        fingerprint="chain",
    )  # fmt: skip


def plan_of(
    stages: tuple[Stage, ...], schedule: Schedule, microbatches: int, optimizer: str = "adam"
) -> Plan:
    return Plan(
        model=ModelId(
            name="chain", fingerprint="chain", num_parameters=0, num_blocks=0,
            inputs=(InputSpec(name="0", shape=(BATCH, WIDTH), dtype="float64"),),
        ),
        cluster=ClusterId(name="local", fingerprint="", num_devices=8),
        global_batch_size=BATCH,
        num_microbatches=microbatches,
        optimizer=optimizer,
        precision="fp64",
        stages=stages,
        schedule=ScheduleTable(
            name=schedule.name, rows=tuple(" ".join(map(str, row)) for row in schedule.ranks)
        ),
        layouts=(),
    )  # fmt: skip


def programs_of(chain: Chain, plan: Plan, rank: int) -> tuple[StageProgram, ...]:
    graph = graph_of(chain)
    found = []
    for index, stage in enumerate(plan.stages):
        if rank not in stage.devices:
            continue
        share = stage.batch_shares[stage.coordinates(rank)["dp"]]
        found.append(_program(chain, graph, plan, index, share))
    return tuple(found)


def make_job(chain: Chain, plan: Plan, **settings: object) -> Job:
    """This rank's part of a job that trains with Adam."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    graph, device = graph_of(chain), torch.device("cpu")
    programs = programs_of(chain, plan, rank)
    parts = build_rank(plan, graph, programs, model_tensors(chain), rank, device, 0)
    optimizer = make_optimizer("adam", parts.held, 0.01, chain)
    return Job(plan, graph, parts, optimizer, chain, device, **settings)


@cache
def _codes() -> dict[str, BlockCode]:
    return {
        name: BlockCode(name, fx.symbolic_trace(module))
        for name, module in (("first", _First()), ("middle", _Middle()), ("last", _Last()))
    }


def _program(chain: Chain, graph: Graph, plan: Plan, index: int, share: int) -> StageProgram:
    codes = _codes()
    blocks = plan.stage_blocks(graph, index)
    stage = plan.stages[index]
    calls = tuple(
        Call(b.name, codes[b.pattern], b.params, b.inputs, b.outputs, whole_form(stage, b))
        for b in blocks
    )
    first, last = graph.blocks.index(blocks[0]), graph.blocks.index(blocks[-1])
    params = tuple(
        Param(n, t.fqn, t.kind, t.shape, t.dtype, t.requires_grad, (), whole_runs(t.shape), ())
        for n in dict.fromkeys(name for b in blocks for name in b.params)
        for t in (graph.tensors[n],)
    )

    def border(block: int) -> tuple[BorderValue, ...]:
        names = dict.fromkeys((f"h{block}", "h0"))
        return tuple(BorderValue(n, (share, WIDTH), "float64", True, Shard(0)) for n in names)

    ends = last == chain.num_blocks - 1
    return StageProgram(
        index, border(first - 1) if first else (), () if ends else border(last), None, None, calls,
        ("x",) * (first == 0) + ("y",) * ends, params, "loss" if ends else "", "",
    )  # fmt: skip


def reference(chain: Chain, batches: list[tuple[Tensor, Tensor]], clip: float | None = None):
    """Losses and final parameters of plain training with Adam."""
    optimizer = torch.optim.Adam([p for p in chain.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = chain(x, y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(chain.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().clone() for name, p in chain.named_parameters()}


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, WIDTH)
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        for _ in range(count)
    ]
