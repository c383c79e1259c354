"""Dropout's part in a step: processor time of `job.step` over that of plain PyTorch.

python -m benchmarks.dropping [--repeats 15]

GPT-2 and a Llama-like model of width 64 with 4 layers on 8 samples of 64 tokens, one thread,
float32, with dropout 0 and 0.1 (Llama has it in attention only), whole and in 4 micro-batches.
Both train the same model by SGD; plain PyTorch draws its own masks. Steps of both alternate, and
the median of the ratios of neighbours is told, as others may use the machine.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import process_time

import torch
from torch import nn
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


def ratio(make: Callable[[float], nn.Module], p: float, microbatches: int, repeats: int) -> float:
    """Of the job to plain PyTorch."""
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

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            (plain(**part, use_cache=False).loss / microbatches).backward()
        optimizer.step()

    found = []
    for _ in range(repeats):
        ours, theirs = _taken_s(lambda: job.step(batch)), _taken_s(step)
        found.append(ours / theirs)
    job.close()
    return median(found[repeats // 3 :])


def _taken_s(step: Callable[[], object]) -> float:
    start = process_time()
    for _ in range(TOGETHER):
        step()
    return process_time() - start


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    for name, make in MODELS.items():
        for count in MICROBATCHES:
            found = [ratio(make, p, count, repeats) for p in DROPPED]
            told = ", ".join(f"dropout {p:g}: {x:.2f}" for p, x in zip(DROPPED, found, strict=True))
            print(f"{name}, micro-batches {count}: {told}")


if __name__ == "__main__":
    main()
