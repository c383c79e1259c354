"""Trainers of others on two ranks, each the gradients of all: two batches a step, four an epoch.

`python -m tests.integrations.loops TRAINER FORM FOLDER` says what a form of a user's own sees.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import meshwright as mw
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import run_ranks
from tests.integrations.as_torchrun import as_torchrun
from tests.integrations.setting import BATCH, LR, Tokens, batches, model

EPOCH = 4


def formed(form: str, **settings: int) -> Plan:
    tokens = torch.zeros(BATCH, 8, dtype=torch.int64)
    graph = mw.trace(model(), {"input_ids": tokens, "labels": tokens})
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2))
    choice = FormChoice(form=form, settings=settings)
    return rehash(replace(plan, stages=(replace(plan.stages[0], sync=choice),)))


class Placed:
    """A loader that knows where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Any:
        while self.at < EPOCH:
            self.at += 1
            yield batches(EPOCH)[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def by_hf(plan: Plan, folder: str, steps: int, resume: bool = False, tune: bool = False) -> mw.Job:
    from meshwright.integrations.hf import JobTrainer

    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=steps, learning_rate=LR, optim="sgd", report_to=[],
        gradient_accumulation_steps=2, disable_tqdm=True, train_sampling_strategy="sequential",
        save_strategy="steps", save_steps=1, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = JobTrainer(
        model(), arguments, train_dataset=Tokens(BATCH * EPOCH), plan=plan, tune=tune
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if resume else None)
    return trainer.job


def by_lightning(
    plan: Plan, folder: str, steps: int, resume: bool = False, tune: bool = False
) -> mw.Job:
    import lightning

    from meshwright.integrations.lightning import JobStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(labels=batch["labels"], input_ids=batch["input_ids"]).loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(**batch).loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=LR)

    strategy = JobStrategy(plan, tune=tune)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, logger=False,
        accumulate_grad_batches=2, enable_progress_bar=False, default_root_dir=folder,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    known = f"{folder}/known" if resume else None
    trainer.fit(Module(), Placed(), DataLoader(Tokens(BATCH), BATCH), ckpt_path=known)
    trainer.save_checkpoint(f"{folder}/known")
    assert strategy.job is not None
    return strategy.job


LOOPS = {"hf": by_hf, "lightning": by_lightning}


def seen(name: str, plan: Plan, folder: str) -> dict[str, Any]:
    """By this rank: its samples of each batch, and what its form saw, whole and in two runs."""
    as_torchrun()
    train = LOOPS[name]
    found: dict[str, Any] = {}
    for kind, runs in {"whole": [(3, False)], "broken off": [(1, False), (3, True)]}.items():
        for steps, resume in runs:
            job = train(plan, f"{folder}/{kind}", steps, resume)
            parts: list[Any] = [job.shard(batch) for batch in batches(EPOCH)]
            found["samples"] = [part["input_ids"].tolist() for part in parts]
            found[kind] = job.parts.stages[0].sync.seen  # type: ignore[attr-defined]
            job.close()
    return found


if __name__ == "__main__":
    trainer, form, folder = sys.argv[1:]
    print(json.dumps(run_ranks(2, seen, trainer, formed(form), folder, timeout_s=200)))
