"""Dropout's part in a step: processor time and dispatched operators, job against plain PyTorch.

python -m benchmarks.dropping [--repeats 15] [--out docs/results/dropping.md]

GPT-2 and a Llama-like model of width 64 with 4 layers on 8 samples of 64 tokens, one thread,
float32, with dropout 0 and 0.1 (Llama has it in attention only), whole and in 4 micro-batches.
Both train the same model by SGD; plain PyTorch draws its own masks. Steps of both alternate, and
the median of the ratios of neighbours is told, as others may use the machine.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job

WIDTH, LAYERS, HEADS, WORDS, SAMPLES, TOKENS = 64, 4, 4, 256, 8, 64
MICROBATCHES = (1, 4)
DROPPED = (0.0, 0.1)
TOGETHER = 5
"""Steps that are timed as one."""


def gpt2(p: float) -> nn.Module:
    """Drops embeddings, chances of attention and both residuals."""
    config = GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=WORDS, n_positions=TOKENS,
        resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def llama(p: float) -> nn.Module:
    """Drops chances of attention, as Llama's code can."""
    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, intermediate_size=2 * WIDTH, vocab_size=WORDS,
        max_position_embeddings=TOKENS, attention_dropout=p, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


MODELS: dict[str, Callable[[float], nn.Module]] = {"GPT-2": gpt2, "Llama": llama}


@dataclass(frozen=True, slots=True)
class Compared:
    """A job beside plain PyTorch."""

    ratio: float
    """Of the processor seconds of their steps."""
    ours: int
    """Operators that torch dispatches in a step."""
    theirs: int


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def compared(
    make: Callable[[float], nn.Module], p: float, microbatches: int, repeats: int
) -> Compared:
    """Train both for some steps."""
    torch.manual_seed(0)
    model, plain = make(p), make(p)
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    graph = trace(model, batch)
    problem = make_problem(graph, Cluster.local(1), optimizer="sgd", precision="fp32")
    choice = uniform_choice(problem, num_microbatches=microbatches)
    job = compile_job(model, build_plan(problem, choice, predict=False), graph=graph, check=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3, fused=True)
    parts = [{name: part for name in batch} for part in ids.chunk(microbatches)]

    def ours() -> object:
        return job.step(batch)

    def theirs() -> None:
        optimizer.zero_grad()
        for part in parts:
            (plain(**part, use_cache=False).loss / microbatches).backward()
        optimizer.step()

    found = [_taken_s(ours) / _taken_s(theirs) for _ in range(repeats)]
    made = Compared(median(found[repeats // 3 :]), _counted(ours), _counted(theirs))
    job.close()
    return made


def _counted(step: Callable[[], object]) -> int:
    with _Count() as counted:
        step()
    return counted.count


def _taken_s(step: Callable[[], object]) -> float:
    start = process_time()
    for _ in range(TOGETHER):
        step()
    return process_time() - start


def lines(repeats: int) -> Iterator[str]:
    """Rows of the table."""
    for (name, make), count, p in product(MODELS.items(), MICROBATCHES, DROPPED):
        one = compared(make, p, count, repeats)
        yield f"| {name} | {count} | {p:g} | {one.ratio:.2f} | {one.ours:,} | {one.theirs:,} |"


def page(rows: Iterable[str]) -> str:
    """The page of results."""
    return f"""# Dropout's part in a step

`python -m benchmarks.dropping`, {date.today():%d %B %Y}, one thread, float32,
torch {torch.__version__}. Steps of a job over those of plain PyTorch in processor time, the two in
turns, and the operators that torch dispatches in a step. Plain PyTorch draws its masks by
`bernoulli_`, a job by counted numbers, the same under every layout.

| model | micro-batches | dropout | time over plain | operators of the job | of plain |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = page(list(lines(given.repeats)))
    if given.out:
        given.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
