"""A Trainer's batches may hold dicts, lists and tuples; what is no tensor is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

import meshwright as mw
from meshwright.ir.errors import TraceError
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import alone

pytest.importorskip("accelerate")
BATCH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, 5)

    def forward(self, features: Any, labels: Tensor, name: Any = None) -> dict[str, Tensor]:
        left, (right, scale) = features["ids"]["left"], features["pair"]
        logits = self.head(self.table(left) - self.table(right)) * scale[:, None]
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def samples(count: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    left, right, labels = torch.randint(5, (3, count), generator=draw)
    scale = torch.rand(count, generator=draw)
    return [
        {"features": {"ids": {"left": left[i]}, "pair": (right[i], scale[i])}, "labels": labels[i]}
        for i in range(count)
    ]


def _trained(folder: Any) -> tuple[list[float], list[float], str]:
    from meshwright.integrations.hf import JobTrainer

    example = default_collate(samples(BATCH))
    problem = make_problem(mw.trace(Net(), example), mw.Cluster.local(1), precision="fp32")
    plan = build_plan(problem, uniform_choice(problem, num_microbatches=2))

    def trained(kind: Any, data: list[dict[str, Any]], **more: Any) -> list[float]:
        sizes = {"per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH}
        arguments = TrainingArguments(
            str(folder), use_cpu=True, num_train_epochs=2, learning_rate=0.1, logging_steps=1,
            report_to=[], disable_tqdm=True, save_strategy="no", **({} if more else sizes),
        )  # fmt: skip
        made = kind(Net(), arguments, train_dataset=data, eval_dataset=data[:BATCH],
                    data_collator=default_collate, **more)  # fmt: skip
        made.train()
        logs = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        return [*logs, made.evaluate()["eval_loss"]]

    plain = trained(Trainer, samples(3 * BATCH))
    job = trained(JobTrainer, samples(3 * BATCH), plan=plan)
    named = [{**sample, "name": "a"} for sample in samples(BATCH)]
    try:
        trained(JobTrainer, named, plan=plan)
    except TraceError as error:
        return plain, job, str(error)
    return plain, job, "fine"


def test_what_is_inside_a_batch_reaches_the_model_and_what_cannot_is_refused(tmp_path: Any) -> None:
    plain, job, said = alone(_trained, tmp_path)
    assert len(plain) == 7 and len(set(plain)) == 7
    assert job == pytest.approx(plain, rel=1e-4)
    assert "input 'name.0' is a str" in said and "fix other values" in said
