"""Adapters of equal size on a small task: LoRA of peft and ours, Q-BLoRA, QA-BLoRA.

python -m benchmarks.adapters [--steps 100] [--rank 4]

A GPT-2 of bytes is trained on the source of the interpreter's library, then frozen and quantised;
adapters learn the interpreter's help texts. What is told is the loss on held-out text, mean and
range over three seeds, at the best of the learning rates. Needs peft.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw

SEEDS, RATES = (0, 1, 2), (3e-3, 1e-2)
LENGTH, BATCH, BLOCK, BASE_STEPS = 32, 16, 16, 400


def sources() -> Tensor:
    """Bytes of the library's files, in order of their names."""
    folder = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def help_texts() -> tuple[Tensor, Tensor]:
    """Bytes of the help texts: to learn from, and held out."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    found = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return found[: len(found) * 9 // 10], found[len(found) * 9 // 10 :]


def drawn(text: Tensor, generator: torch.Generator, samples: int = BATCH) -> Tensor:
    starts = torch.randint(len(text) - LENGTH, (samples,), generator=generator)
    return torch.stack([text[at : at + LENGTH] for at in starts])


def trained(model: nn.Module, text: Tensor, steps: int, lr: float, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        ids = drawn(text, generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def loss_of(model: nn.Module, text: Tensor) -> float:
    ids = drawn(text, torch.Generator().manual_seed(99), 128)
    return float(model(input_ids=ids, labels=ids).loss)


def base() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=3, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return trained(GPT2LMHeadModel(config), sources(), BASE_STEPS, 3e-3, 0)


@dataclass(frozen=True)
class Contender:
    """A way to adapt a model."""

    name: str
    form: str
    adapt: Callable[[nn.Module, int], nn.Module]


def ours(kind: str) -> Callable[[nn.Module, int], nn.Module]:
    def adapt(model: nn.Module, rank: int) -> nn.Module:
        return mw.adapt(model, kind, rank=rank, alpha=2.0 * rank, skip="lm_head")

    return adapt


def of_peft(**more: Any) -> Callable[[nn.Module, int], nn.Module]:
    """The base is quantised when peft has put its layers around it."""

    def adapt(model: nn.Module, rank: int) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_proj", "c_fc"],
            fan_in_fan_out=True, **more,
        )  # fmt: skip
        return get_peft_model(model, config)

    return adapt


CONTENDERS = (
    Contender("peft LoRA", "", of_peft()),
    Contender("balanced", "", ours("balanced")),
    Contender("peft LoRA", "nf4", of_peft()),
    Contender("balanced", "nf4", ours("balanced")),
    Contender("lora", "int4", ours("lora")),
    Contender("pooled", "int4", ours("pooled")),
)


def made(contender: Contender, model: nn.Module, rank: int, seed: int) -> nn.Module:
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    if contender.name.startswith("peft"):
        model = contender.adapt(model, rank)
        return mw.quantise(model, contender.form, block=BLOCK) if contender.form else model
    if contender.form:
        mw.quantise(model, contender.form, block=BLOCK)
    return contender.adapt(model, rank)


def main() -> None:
    """Prints a table."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=100)
    asked.add_argument("--rank", type=int, default=4)
    options = asked.parse_args()
    torch.set_num_threads(1)
    out, whole, (text, held_out) = Console(), base(), help_texts()
    out.print(f"the base, not adapted: {loss_of(whole, held_out):.4f} on held-out help texts")
    table = Table("adapter", "base", "trained parameters", "at the start", "loss after", "range",
                  "rate", title=f"{options.steps} steps, rank {options.rank}")  # fmt: skip
    for contender in CONTENDERS:
        model = made(contender, whole, options.rank, 0)
        size = sum(p.numel() for p in model.parameters() if p.requires_grad)
        found = {
            lr: [
                loss_of(
                    trained(made(contender, whole, options.rank, seed), text, options.steps, lr,
                            seed),
                    held_out,
                )
                for seed in SEEDS
            ]
            for lr in RATES
        }  # fmt: skip
        rate = min(RATES, key=lambda lr: sum(found[lr]))
        losses = found[rate]
        out.print(contender.name, contender.form, found)
        table.add_row(
            contender.name, contender.form or "float32", f"{size:,}",
            f"{loss_of(model, held_out):.4f}", f"{sum(losses) / len(losses):.4f}",
            f"{min(losses):.4f} to {max(losses):.4f}", f"{rate:g}",
        )  # fmt: skip
    out.print(table)


if __name__ == "__main__":
    main()
