"""Memory of a GPT-2 with LoRA by peft, planned and measured in bytes of tensors.

python -m benchmarks.adapter_memory

Each plan runs on this machine's processes; measured is the most that a rank of a stage held in its
third step. Needs peft.
"""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.exact import exact
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks

CHOICES: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"num_microbatches": 2}, {"recompute": "full"}],
    2: [
        {"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 3, "num_microbatches": 2},
        {"tp": 2}, {"pp": 2, "num_microbatches": 2},
    ],
    4: [{"dp_shard": 4, "zero": 3}, {"dp_shard": 2, "zero": 3, "tp": 2}],
}  # fmt: skip


def lora() -> nn.Module:
    """Width 256, four layers, rank 8 beside all layers of attention and MLP."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    targets = ["c_attn", "c_proj", "c_fc"]
    own = LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=True)
    return get_peft_model(exact(GPT2LMHeadModel(config)), own)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (8, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def most(plans: list[Plan], graph: Graph) -> list[int]:
    """The most bytes of tensors on this rank in the third step, plan by plan."""
    found = []
    for plan in plans:
        job = compile_job(lora(), plan, optimizer="adamw", device="cpu", graph=graph, check=False)
        found.append(peak_of(job, batch()))
    return found


def main() -> None:
    """Prints a table."""
    table = Table("precision", "ranks", "plan", "stage", "measured, MB", "planned, MB", "error")
    for precision in ("fp32", "bf16"):
        graph = trace(lora(), batch(), precision="bf16" if precision == "bf16" else "")
        for world, choices in CHOICES.items():
            problem = make_problem(
                graph, Cluster.local(world), optimizer="adamw", precision=precision
            )
            plans = [build_plan(problem, uniform_choice(problem, **c), predict=False)
                     for c in choices]  # fmt: skip
            found = run_ranks(world, most, plans, graph)
            for number, (choice, plan) in enumerate(zip(choices, plans, strict=True)):
                told = predict_plan(problem, plan)
                for index, stage in enumerate(told.stages):
                    tracked = found[plan.stages[index].devices[0]][number]
                    planned = stage.memory.tensor_bytes
                    text = ", ".join(f"{k} {v}" for k, v in choice.items()) or "as it is"
                    table.add_row(
                        precision, str(world), text, str(index), f"{tracked / 1e6:.2f}",
                        f"{planned / 1e6:.2f}", f"{planned / tracked - 1:+.1%}",
                    )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
