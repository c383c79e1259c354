"""K-FAC by plain PyTorch with hooks, and jobs that do the same with owners."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.settings import course
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.parameters import unmatched
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.sent import counted
from tests.form_files.small import BATCH, batches, graph, model

NUMBERS = ("damping", "kl_clip", "lr", "factor_update_steps", "inv_update_steps")
MOMENTUM, DECAY, DAMPING = 0.9, 0.9, 0.003
LAYERS = ("layers.*.up.*", "layers.*.down.*", "head.*")
CLIPPED: dict[str, Setting] = {
    "damping": DAMPING, "factor_decay": DECAY, "kl_clip": 1e-3, "lr": 0.1, "inv_update_steps": 2,
}  # fmt: skip
FREE = {**CLIPPED, "kl_clip": 0.0}
Trained = tuple[list[float], dict[str, Tensor]]


class Images(nn.Module):
    """Convolutions with and without what a bias, a step and a border do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 3, 2, bias=False)
        self.head = nn.Linear(3 * 9, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.cross_entropy(self.head(x.flatten(1)), y)


def images() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Images().double().train()


def image_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(BATCH, 2, 8, 8, generator=generator, dtype=torch.float64),
         torch.randint(5, (BATCH,), generator=generator))
        for _ in range(5)
    ]  # fmt: skip


CASES: dict[str, Any] = {"layers": (model, batches), "images": (images, image_batches)}


def graph_of(case: str, precision: str = "fp64") -> Graph:
    return _traced(case, precision)


@cache
def _traced(case: str, precision: str) -> Graph:
    make, data = CASES[case]
    if precision != "fp64":
        return trace(make(), data()[0], precision=precision)
    return graph() if case == "layers" else trace(make(), data()[0])


def problem(ranks: int, case: str = "layers", precision: str = "fp64") -> Problem:
    traced = graph_of(case, precision)
    return make_problem(traced, Cluster.local(ranks), precision=precision, optimizer="sgd_momentum")


def plan_of(
    ranks: int,
    settings: Mapping[str, Setting] = CLIPPED,
    case: str = "layers",
    patterns: tuple[str, ...] = LAYERS,
    **sizes: Any,
) -> Plan:
    """K-FAC of the layers of each stage; the rest is stepped by rows, or as a whole."""
    made = problem(ranks, case, sizes.pop("precision", "fp64"))
    uneven = sizes.pop("uneven", None)
    zero = sizes.get("zero", 1)
    shape = {"dp_shard": ranks, "num_microbatches": 2, "zero": 1} | sizes
    plan = build_plan(made, uniform_choice(made, **shape), predict=False)
    own = ParameterChoice(zero=zero, sync=FormChoice(form="kfac", settings=dict(settings)))
    stages = []
    for index, stage in enumerate(plan.stages):
        blocks = plan.stage_blocks(made.graph, index)
        paths = [made.graph.tensors[n].fqn for block in blocks for n in block.params]
        said = dict.fromkeys(patterns, own)
        absent = unmatched(said, paths)
        apart = {k: v for k, v in said.items() if k not in absent}
        shares = uneven or stage.batch_shares
        stages.append(replace(stage, by_parameter=apart, batch_shares=shares))
    return replace(plan, stages=tuple(stages))


def job_of(plan: Plan, lr: float, case: str = "layers") -> Any:
    return compile_job(
        CASES[case][0](),
        plan,
        lr=lr,
        device="cpu",
        graph=graph_of(case, plan.precision),
        check=False,
    )


def train(plan: Plan, lr: float, case: str = "layers") -> tuple[list[float], Any, list[int]]:
    """Losses, parameters, bytes of the messages of a step."""
    job = job_of(plan, lr, case)
    with counted(job, "gradients") as sent:
        losses = [float(job.step(batch)) for batch in CASES[case][1]()]
    found = full_state(job)
    job.close()
    return losses, found, sent[-1]


def narrow(plan: Plan, lr: float) -> tuple[list[float], set[torch.dtype]]:
    """Losses, and dtypes of what the form keeps."""
    job = job_of(plan, lr)
    losses = [float(job.step(batch)) for batch in batches()]
    dtypes = {x.dtype for stage in job.parts.stages.values() for x in stage.sync.kept}
    job.close()
    return losses, dtypes


def resumed(plan: Plan, lr: float, folder: str) -> tuple[list[float], list[float]]:
    """Losses of all steps, and again from a checkpoint after three."""
    job = job_of(plan, lr)
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(float(job.step(batch)))
        if number == 2:
            job.save(folder)
    job.close()
    again = job_of(plan, lr)
    again.load(folder)
    later = [float(again.step(batch)) for batch in batches()[3:]]
    again.close()
    return losses, later


def most_tracked(plan: Plan) -> int:
    """The most bytes in the third step."""
    job = job_of(plan, 0.01)
    for batch in batches()[:2]:
        job.step(batch)
    job.track_memory(batches()[2])
    found: int = job.tensor_memory.peak_bytes
    job.close()
    return found


def plain(settings: Mapping[str, Setting], lr: float, case: str = "layers") -> Trained:
    """In one process, each batch whole."""
    make, data = CASES[case]
    trained = make()
    sgd = torch.optim.SGD(trained.parameters(), lr=lr, momentum=MOMENTUM)
    layers = [m for m in trained.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    read, back = dict[nn.Module, Tensor](), dict[nn.Module, Tensor]()
    for layer in layers:
        layer.register_forward_hook(lambda m, given, made: read.update({m: given[0].detach()}))
        layer.register_full_backward_hook(lambda m, into, out: back.update({m: out[0].detach()}))
    means, inverses = dict[nn.Module, Any](), dict[nn.Module, Any]()
    losses = []
    for step, batch in enumerate(data()):
        told = {k: _at(settings, k, step) for k in NUMBERS}
        sgd.zero_grad()
        loss = trained(*batch)
        loss.backward()
        losses.append(float(loss.detach()))
        new, length = dict[nn.Module, Tensor](), 0.0
        for layer in layers:
            a, g = _rows(layer, read[layer], back[layer])
            now = a.T @ a / len(a), g.T @ g * len(read[layer])
            old = means.get(layer, now)
            if step % int(told["factor_update_steps"]) == 0:
                means[layer] = [DECAY * x + (1 - DECAY) * y for x, y in zip(old, now, strict=True)]
            if step % int(told["inv_update_steps"]) == 0:
                inverses[layer] = _inverses(means[layer], told["damping"], settings)
            matrix = _matrix(layer)
            new[layer] = _divided(matrix, inverses[layer], told["damping"])
            length += float((new[layer] * matrix).sum()) * told["lr"] ** 2
        limit = told["kl_clip"]
        scale = min(1.0, math.sqrt(limit / abs(length))) if limit else 1.0
        for layer in layers:
            weight = new[layer] * scale
            if layer.bias is not None:
                layer.bias.grad, weight = weight[:, -1].clone(), weight[:, :-1]
            layer.weight.grad = weight.reshape(layer.weight.shape).clone()
        sgd.step()
    return losses, {name: p.detach().clone() for name, p in trained.named_parameters()}


def _at(settings: Mapping[str, Setting], name: str, step: int) -> float:
    return [x for first, x in course(settings.get(name, 1)) if first <= step][-1]


def _inverses(means: Any, damping: float, settings: Mapping[str, Setting]) -> Any:
    """Of both factors; or their eigenvalues and eigenvectors."""
    if settings.get("base") == "eigen":
        return [torch.linalg.eigh(x) for x in means]
    first, second = means
    pi = math.sqrt((first.trace() / len(first)) / (second.trace() / len(second)))
    root = math.sqrt(damping)
    return [
        torch.linalg.inv(x + by * torch.eye(len(x), dtype=x.dtype))
        for x, by in ((first, root * pi), (second, root / pi))
    ]


def _divided(matrix: Tensor, made: Any, damping: float) -> Tensor:
    """A gradient as the factors precondition it."""
    if isinstance(made[0], Tensor):
        found: Tensor = made[1] @ matrix @ made[0]
        return found
    # All at once: (A x G + damping)^-1 of the gradient as a vector.
    both = [vectors @ torch.diag(values.clamp_min(0)) @ vectors.T for values, vectors in made]
    whole = torch.kron(both[1], both[0]) + damping * torch.eye(matrix.numel(), dtype=matrix.dtype)
    return torch.linalg.solve(whole, matrix.flatten()).view(matrix.shape)


def _rows(layer: Any, read: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """What each position read, and the gradient of what it made."""
    if isinstance(layer, nn.Conv2d):
        parts = []
        (kh, kw), (sh, sw), (ph, pw) = layer.kernel_size, layer.stride, layer.padding
        padded = nn.functional.pad(read, (pw, pw, ph, ph))
        for i in range(back.shape[2]):
            for j in range(back.shape[3]):
                window = padded[:, :, i * sh : i * sh + kh, j * sw : j * sw + kw]
                parts.append(window.reshape(len(read), -1))
        a, g = torch.cat(parts), torch.cat([back[:, :, i, j] for i in range(back.shape[2])
                                            for j in range(back.shape[3])])  # fmt: skip
    else:
        a, g = read, back
    if layer.bias is not None:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
    return a, g


def _matrix(layer: Any) -> Tensor:
    found: Tensor = layer.weight.grad.reshape(layer.weight.shape[0], -1)
    if layer.bias is not None:
        found = torch.cat([found, layer.bias.grad[:, None]], 1)
    return found
