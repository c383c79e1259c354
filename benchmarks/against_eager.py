"""What `job.step` takes in one process beside the same step in plain PyTorch, with the processor
time of the only thread: of models so narrow that what is computed is next to nothing.

    python -m benchmarks.against_eager [--pairs 60] [--only gpt2/bf16/4/0.1] [--profile]
        [--kernels auto]

Steps are taken in turn, ours and theirs; printed is the median of the ratios of pairs, with what
each takes in milliseconds and how many operators of torch it calls, forward and backward. In bf16
plain PyTorch follows the same policy: blocks read copies in bfloat16, gradients are summed in
float32, AdamW (fused) steps float32, and all copies are cast by one `foreach` call after the step.
With dropout each draws masks of its own. The job has the kernels that a search puts in
(`--kernels auto`, the default of `search`); with `none` it has the model's own operators.
"""

import argparse
import cProfile
import pstats
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import thread_time

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.precision import copies_of
from meshwright.ir.torch_modes import watching
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.kernels import AUTO, kernels_for
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job

WIDTH, LAYERS, SAMPLES, LENGTH, VOCAB = 64, 4, 8, 16, 256
LR = 1e-4
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}
"""How far losses of the two may lie apart, as a share."""
DROPPED, OTHER_MASKS = (0.0, 0.1), 0.1
"""Chances of dropout, and how far losses may lie apart where masks are others."""
Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]


def gpt2(p: float = 0.0) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=4,
        resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLM",
    )).train()  # fmt: skip


def llama(p: float = 0.0) -> nn.Module:
    """The same weights every time; dropout is in attention alone."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, use_cache=False,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=0, eos_token_id=1,
        attention_dropout=p,
    )).train()  # fmt: skip


MODELS: dict[str, Callable[[float], nn.Module]] = {"gpt2": gpt2, "llama": llama}


@dataclass(frozen=True)
class HotCase:
    """A step that is compared."""

    model: str
    precision: str
    microbatches: int
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.model}/{self.precision}/{self.microbatches}/{self.dropout:g}"

    @property
    def rounding(self) -> float:
        """How far losses may lie apart, as a share."""
        return OTHER_MASKS if self.dropout else ROUNDING[self.precision]


CASES = [HotCase(*found) for found in product(MODELS, ("fp32", "bf16"), (1, 4), DROPPED)]


def batches() -> Iterator[Batch]:
    """One after the other, other tokens each."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(2, VOCAB, (SAMPLES, LENGTH), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


def job_step(case: HotCase, kernels: str = AUTO) -> Step:
    """A step of a job of one rank."""
    model, batch = MODELS[case.model](case.dropout), next(batches())
    cluster = Cluster.local(1)
    names, wins = kernels_for([cluster], kernels)
    graph = trace(model, batch, precision=case.precision, kernels=names, wins=wins)
    problem = make_problem(graph, cluster, optimizer="adamw", precision=case.precision)
    choice = uniform_choice(problem, num_microbatches=case.microbatches, recompute="none")
    plan = build_plan(problem, choice, predict=False)
    return compile_job(model, plan, graph=graph, lr=LR, check=False).step


def eager_step(case: HotCase) -> Step:
    """The same in plain PyTorch."""
    model = MODELS[case.model](case.dropout)
    stepped = read = list(model.parameters())
    copies = copies_of(case.precision)
    if copies is not None:
        stepped = [p.detach().to(copies.stepped, copy=True).requires_grad_() for p in read]
        model = model.to(copies.read)
    optimizer = torch.optim.AdamW(stepped, lr=LR, fused=True)

    def step(batch: Batch) -> Tensor:
        total = torch.zeros(())
        for number in range(case.microbatches):
            part = {name: x.chunk(case.microbatches)[number] for name, x in batch.items()}
            loss = model(**part).loss / case.microbatches
            loss.backward()
            total += loss.detach()
            for p, copy in zip(stepped, read, strict=True) if copies is not None else ():
                gradient, copy.grad = copy.grad, None
                if p.grad is None:
                    p.grad = gradient.to(p.dtype)
                else:
                    p.grad += gradient
        optimizer.step()
        optimizer.zero_grad()
        if copies is not None:
            with torch.no_grad():
                torch._foreach_copy_(read, stepped)
        return total

    return step


def operators(step: Step, batch: Batch) -> int:
    """How many operators a step calls."""
    count = 0

    def called(_: list[Tensor]) -> None:
        nonlocal count
        count += 1

    with watching(called):
        step(batch)
    return count


def timed_s(step: Step, batch: Batch) -> tuple[float, Tensor]:
    """Processor seconds of one step, and its loss."""
    start = thread_time()
    loss = step(batch)
    return thread_time() - start, loss


def compare(case: HotCase, pairs: int, kernels: str) -> None:
    """Prints a line; the losses of the two are to be equal to rounding."""
    mine, theirs = job_step(case, kernels), eager_step(case)
    given, rows = batches(), []
    for number in range(pairs + 5):
        batch = next(given)
        ours_s, ours = timed_s(mine, batch)
        plain_s, plain = timed_s(theirs, batch)
        assert abs(float(ours) - float(plain)) <= case.rounding * abs(float(plain)), (
            case,
            ours,
            plain,
        )
        if number >= 5:  # both have made their states and are warm
            rows.append((ours_s, plain_s))
    ratio = median(a / b for a, b in rows)
    ours_s, plain_s = (median(column) for column in zip(*rows, strict=True))
    batch = next(given)
    print(
        f"{case!s:18s} {ratio:6.3f}   job {ours_s * 1e3:6.2f} ms, {operators(mine, batch):5d} "
        f"operators   eager {plain_s * 1e3:6.2f} ms, {operators(theirs, batch):5d} operators",
        flush=True,
    )


def profile(case: HotCase, kernels: str, steps: int = 100) -> None:
    """Prints where a job's steps spend their time."""
    mine, batch = job_step(case, kernels), next(batches())
    for _ in range(5):
        mine(batch)
    watch = cProfile.Profile()
    watch.enable()
    for _ in range(steps):
        mine(batch)
    watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(45)


def main() -> None:
    """Compares all, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--only", default="")
    parser.add_argument("--kernels", default=AUTO, help="of the job, as of `search`")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if options.only in str(case):
            if options.profile:
                profile(case, options.kernels)
            else:
                compare(case, options.pairs, options.kernels)


if __name__ == "__main__":
    main()
