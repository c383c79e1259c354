"""Small models under plans in which many things are pinned at once, drawn by chance, against plain
PyTorch.

Each feature has tests of its own; here they meet. A plan is searched for with the pins, and trained
in float64 with an optimizer that is drawn too; some jobs go on under another such plan, from a
checkpoint. Losses and parameters must be those of one process, or the product must say in words why
not.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.attack.layouts import Trained, compared, refused
from benchmarks.attack.result import Result
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.planner.search.search import search
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.models import CASES
from meshwright.testing.plain import plain_step
from meshwright.testing.spawn import RankFailed, alone, run_ranks

FULL, STEPS, LR, CLIP = 400, 3, 1e-3, 0.5
LIMIT_S = 20.0
MODELS = ("gpt2", "llama", "mixtral", "t5", "bert_mlm", "dlrm", "gnmt", "sequential")
"""Those without batch-norm, whose statistics are those of a micro-batch."""
AXES = ("pp", "tp", "tp_row", "tp_col", "cp", "dp_shard", "ep")
PINS: Mapping[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"),
    "sync": ("zero", "dear", "by_owner", "gathered_rows", "packed_rows"),
    "store": ("on_host", "shards_on_host", "sums_on_host", "update_on_host"),
    "saved": ("none", "offload", "selective"),
    "recompute": ("none", "full", "stage_aware"),
    "num_microbatches": ("1", "2", "4"),
    "overlap": ("gradients", "linear", "block", "blocks"),
    "samples": ("own", "shared"),
    "prefetch": ("0", "1", "2"),
}
SCHEDULES = (
    "gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "dual_pipe_v",
    "full_critical_path_1f1b", "pre_recompute_1f1b", "last_no_recompute_1f1b", "synthesised",
)  # fmt: skip
"""Those that leave training as it is."""


def _muon(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Of layers' matrices; the rest has AdamW, as users of Muon have it."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    given = list(module.parameters())
    matrices = [p for p in given if p.ndim == 2 and id(p) not in tables]
    others = [p for p in given if p.ndim != 2 or id(p) in tables]
    return [
        torch.optim.Muon(matrices, lr=LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=LR, weight_decay=0.01),
    ]


def _groups(module: nn.Module) -> torch.optim.Optimizer:
    """AdamW without decay on what has one dim."""
    given = list(module.parameters())
    decayed = [p for p in given if p.ndim > 1]
    plain = [p for p in given if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=LR
    )


OPTIMIZERS: Mapping[str, Callable[[nn.Module], Any]] = {
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=LR),
    "adamw of two groups": _groups,
    "sgd with momentum": lambda module: torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9),
    "muon": _muon,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of one plan."""

    ranks: int
    pins: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.ranks} ranks {' '.join(self.pins)}".rstrip()


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained."""

    model: str
    optimizer: str
    clipped: bool
    plans: tuple[Asked, ...]
    """One after the other, each from the checkpoint of the one before."""

    def __str__(self) -> str:
        clip = ", clipped" if self.clipped else ""
        return f"{self.model}, {self.optimizer}{clip}, {', then '.join(map(str, self.plans))}"


def attacks(size: int, seed: int) -> Iterator[Result]:
    """`size` percent of `FULL` cases."""
    draw = Random(seed)
    for _ in range(max(1, FULL * size // 100)):
        case = drawn(draw)
        start = time.perf_counter()
        held, what = judged(case)
        yield Result(str(case), held, what, time.perf_counter() - start)


def drawn(draw: Random) -> Case:
    """One plan, or two for a job that changes its own."""
    name = draw.choice(MODELS)
    plans = tuple(_asked(draw, name) for _ in range(draw.choice((1, 1, 2))))
    return Case(name, draw.choice(list(OPTIMIZERS)), draw.random() < 0.3, plans)


def _asked(draw: Random, model: str) -> Asked:
    """A mesh of one or two axes of two ranks each, one of which may be left to the search, and up
    to four other pins."""
    ranks = draw.choice((2, 4, 4))
    mesh = draw.sample(
        AXES if model == "mixtral" else AXES[:-1], draw.randint(ranks // 4, ranks // 2)
    )
    pins = {axis: "2" for axis in mesh}
    known = {key: values for key, values in PINS.items() if key != "samples" or "ep" in mesh}
    for key in draw.sample(list(known), draw.randint(0, 4)):
        pins[key] = draw.choice(known[key])
    if "pp" in mesh and draw.random() < 0.7:
        pins["schedule"] = draw.choice(SCHEDULES)
    return Asked(ranks, tuple(f"{key}={value}" for key, value in sorted(pins.items())))


def judged(case: Case) -> tuple[bool, str]:
    """Whether the product held, and what happened."""
    try:
        plans = alone(_plans, case)
    except RankFailed as error:
        return refused(str(error))
    (size,) = {plan.global_batch_size for plan in plans}
    model = CASES[case.model]
    batches = [model.example(size, 100 + i) for i in range(STEPS * len(plans))]
    losses: tuple[float, ...] = ()
    with TemporaryDirectory() as folder:
        for number, plan in enumerate(plans):
            own = batches[STEPS * number :][:STEPS]
            try:
                ranks = run_ranks(plan.world_size, _train, case, plan, own, folder, number > 0)
            except RankFailed as error:
                return refused(str(error))
            if any(rank.losses != ranks[0].losses for rank in ranks):
                return False, "ranks report different losses"
            losses += ranks[0].losses
    wanted = alone(_plain, case, batches)
    return compared(Trained(losses, ranks[0].state), wanted, frozenset(wanted.state))


def _plans(case: Case) -> list[Plan]:
    model = CASES[case.model]
    module = model.model()
    return [
        search(
            module, Cluster.local(asked.ranks), example_inputs=model.example(),
            loss_fn=model.loss_fn, optimizer=OPTIMIZERS[case.optimizer](module), precision="fp64",
            max_grad_norm=CLIP if case.clipped else None, constraints=asked.pins,
            time_limit_s=LIMIT_S,
        )
        for asked in case.plans
    ]  # fmt: skip


def _train(case: Case, plan: Plan, batches: Sequence[Any], folder: str, goes_on: bool) -> Trained:
    model = CASES[case.model]
    module = model.model()
    job = compile_job(
        module, plan, optimizer=OPTIMIZERS[case.optimizer](module), loss_fn=model.loss_fn,
        device="cpu", check=False,
    )  # fmt: skip
    if goes_on:
        job.load(folder)
    losses = tuple(float(job.step(batch)) for batch in batches)
    job.save(folder)
    state = full_state(job)
    job.close()
    return Trained(losses, state)


def _plain(case: Case, batches: Sequence[Any]) -> Trained:
    model = CASES[case.model]
    module = model.model()
    made = OPTIMIZERS[case.optimizer](module)
    step = _Several(
        made if isinstance(made, list) else [made], module, CLIP if case.clipped else None
    )
    losses = tuple(plain_step(module, model.loss_fn, step, batch) for batch in batches)
    return Trained(losses, {n: p.detach().clone() for n, p in module.named_parameters()})


@dataclass(frozen=True, slots=True)
class _Several:
    """Optimizers that step one after the other, once gradients are clipped."""

    members: Sequence[torch.optim.Optimizer]
    module: nn.Module
    clip: float | None

    def zero_grad(self) -> None:
        for one in self.members:
            one.zero_grad()

    def step(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        for one in self.members:
            one.step()
