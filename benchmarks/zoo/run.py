"""Tries one model: trace, search on local processes, compile, steps beside the single process."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.entry import BATCH, Batch, Entry
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search
from meshwright.planner.strategies import found_by_trying
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.double import all_double
from meshwright.testing.plain import plain_step
from meshwright.testing.spawn import RankFailed, alone, run_ranks

LEARNING_RATE, STEPS = 1e-3, 3
BAR = 1e-9
LONGEST_S = 300.0
FAILURES = (
    MeshwrightError, RankFailed, RuntimeError, TypeError, ValueError, AttributeError, LookupError,
)  # fmt: skip
"""What our code, torch or a model may raise; anything else is a fault of the harness."""


@dataclass(frozen=True, slots=True)
class Tried:
    """How it went; figures that were not reached are zero."""

    name: str
    family: str
    parameters: int = 0
    ops: int = 0
    blocks: int = 0
    ranks: int = 0
    plan: str = ""
    error: float = float("nan")
    seconds: float = 0.0
    reason: str = ""
    by_trying: tuple[str, ...] = ()
    """Operators whose rules were found by trying them."""
    step: str = ""
    """Where it failed: trace, search, reference, run."""

    @property
    def passed(self) -> bool:
        return self.error <= BAR


def attempt(entry: Entry, ranks: int = 4, constraints: tuple[str, ...] = ()) -> Tried:
    """All of it; a failure is told, not raised."""
    started = time.perf_counter()
    found: dict[str, Any] = {}
    reached = ["trace"]
    try:
        _stages(entry, ranks, constraints, found, reached)
        reason = "" if found["error"] <= BAR else _differs(entry, found["error"])
    except FAILURES as failure:
        reason = _told(failure)
    return Tried(
        entry.name, entry.family, seconds=time.perf_counter() - started, reason=reason,
        step=reached[-1] if reason else "", **found,
    )  # fmt: skip


def _stages(
    entry: Entry, ranks: int, constraints: tuple[str, ...], found: dict[str, Any],
    reached: list[str],
) -> None:  # fmt: skip
    model = entry.model()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    graph = traced(entry, model)
    found |= {"ops": len(graph.ops), "blocks": len(graph.blocks)}
    reached.append("search")
    plan = planned(graph, ranks, constraints)
    found |= {"ranks": plan.world_size, "plan": name_of(plan)}
    found["by_trying"] = found_by_trying(graph)
    reached.append("reference")
    batches = [entry.batch(100 + i) for i in range(STEPS)]
    wanted = alone(reference, entry, model, batches, plan.num_microbatches)
    reached.append("run")
    results = run_ranks(
        plan.world_size, train, entry, model, plan, graph, batches, timeout_s=LONGEST_S
    )
    found["error"] = difference(results, wanted)


def _differs(entry: Entry, error: float) -> str:
    """How far, beside what rounding alone does to plain training of this model."""
    moved = alone(sway, entry)
    return (
        f"differs from the single process by {error:.1e}; two single processes differ by "
        f"{moved:.1e} where the parameters of one are moved by one unit of rounding"
    )


def sway(entry: Entry) -> float:
    """How far plain training ends from itself if its parameters begin one rounding away."""
    batches = [entry.batch(100 + i) for i in range(STEPS)]
    plain, moved = entry.model(), entry.model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, towards))
    return difference([reference(entry, moved, batches, 1)], reference(entry, plain, batches, 1))


def _told(failure: BaseException) -> str:
    """The error in one line; where it comes from a rank, the last line of its traceback."""
    text = last_line(str(failure)) if isinstance(failure, RankFailed) else str(failure)
    kind = type(failure).__name__
    return " ".join((text if isinstance(failure, RankFailed) else f"{kind}: {text}").split())


def traced(entry: Entry, model: nn.Module) -> Graph:
    with all_double():
        return trace(model, entry.batch(0), entry.loss_fn, global_batch_size=BATCH)


def planned(graph: Graph, ranks: int, constraints: tuple[str, ...]) -> Plan:
    return search(
        graph, Cluster.local(ranks), precision="fp64", optimizer="adam", constraints=constraints,
        progress=False,
    )  # fmt: skip


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Adam that a gradient of pure rounding does not move: that of an attention key's bias is zero,
    and with the usual epsilon its 1e-17 would count."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-5)


def reference(
    entry: Entry, model: nn.Module, batches: list[Batch], microbatches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, parameters and buffers after plain training on whole batches.

    Batch-norm sees one micro-batch at a time, by contract: then the reference accumulates too.
    """
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    parts = microbatches if normed else 1
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    with all_double():
        losses = [plain_step(model, entry.loss_fn, optimizer, batch, parts) for batch in batches]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, {name: tensor.detach().clone() for name, tensor in state.items()}


def train(
    entry: Entry, model: nn.Module, plan: Plan, graph: Graph, batches: list[Batch]
) -> tuple[list[float], dict[str, Tensor]]:
    """The same under the plan, on one rank."""
    with all_double():  # what the job checks itself by, too
        job = compile_job(
            model, plan, optimizer=adam, loss_fn=entry.loss_fn, device="cpu",
            graph=graph,
        )  # fmt: skip
        losses = [float(job.step(batch)) for batch in batches]
    state = full_state(job)
    job.close()
    return losses, state


def difference(results: list[Any], wanted: tuple[list[float], dict[str, Tensor]]) -> float:
    """The largest relative difference of any loss and any tensor of the state."""
    losses, state = results[0]
    pairs = [(state[name], tensor) for name, tensor in wanted[1].items() if name in state]
    apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, wanted[0], strict=True)]
    apart += [_relative(a, b) for a, b in pairs if b.is_floating_point() and b.numel()]
    return float("inf") if any(x != x for x in apart) else max(apart)


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Relative to the largest element, or to one Adam step where that is larger."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(LEARNING_RATE))


def last_line(text: str) -> str:
    """The error's own line in a traceback."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "rank "))]
    return lines[-1].strip() if lines else text.strip()
