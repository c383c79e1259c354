"""Every argument of a Trainer with a job works as it does without one, or is refused by name."""

import dataclasses
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import meshwright as mw
from meshwright.integrations.hf_arguments import DEPENDS, PARTS, REFUSED, WORKS, check_arguments
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import alone
from tests.integrations.setting import Tokens

pytest.importorskip("accelerate")
BATCH = 4


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=32,
                         num_attention_heads=2, num_key_value_heads=2, bos_token_id=0,
                         eos_token_id=0, use_cache=False, max_position_embeddings=8)  # fmt: skip
    return LlamaForCausalLM(config)


@cache
def plan() -> Plan:
    tokens = torch.zeros(BATCH, 8, dtype=torch.int64)
    graph = mw.trace(model(), {"input_ids": tokens, "labels": tokens})
    problem = make_problem(graph, mw.Cluster.local(1), precision="fp32")
    return build_plan(problem, uniform_choice(problem, num_microbatches=2))


class Named(Tokens):
    """With a column that the model does not take."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


@dataclass(frozen=True)
class Setting:
    """What is asked of both Trainers."""

    arguments: dict[str, Any]
    count: int = 4 * BATCH
    ready: bool = False
    """Whether the optimizer and its scheduler are passed ready made."""


SETTINGS = {
    "adamw": Setting(
        {"num_train_epochs": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2,
         "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6,
         "max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "data_seed": 7,
         "include_num_input_tokens_seen": "all", "average_tokens_across_devices": False}
    ),
    "rmsprop": Setting(
        {"max_steps": 5, "optim": "rmsprop", "max_grad_norm": 0.0, "dataloader_drop_last": True,
         "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0},
         "train_sampling_strategy": "sequential", "torch_empty_cache_steps": 2},
        count=3 * BATCH + 2,
    ),
    "best": Setting(
        {"num_train_epochs": 3, "optim": "sgd", "eval_strategy": "epoch", "save_strategy": "epoch",
         "load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 3.0,
         "metric_for_best_model": "loss", "lr_scheduler_type": "constant", "logging_steps": 2}
    ),
    "plateau": Setting(
        {"num_train_epochs": 3, "optim": "adagrad", "eval_strategy": "epoch", "eval_on_start": True,
         "lr_scheduler_type": "reduce_lr_on_plateau", "eval_accumulation_steps": 1,
         "lr_scheduler_kwargs": {"patience": 0, "factor": 0.1, "threshold": 5.0},
         "metric_for_best_model": "loss"}
    ),
    "ready made": Setting({"max_steps": 4, "weight_decay": 0.3}, ready=True),
}  # fmt: skip


def arguments(folder: Any, **more: Any) -> TrainingArguments:
    given = {"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
             "use_cpu": True, "learning_rate": 1e-2, **more}  # fmt: skip
    return TrainingArguments(str(folder), **given)


def outcome(folder: Any, setting: Setting, job: bool) -> dict[str, Any]:
    """Logs and weights after training, and the loss of an evaluation."""
    from meshwright.integrations.hf import JobTrainer

    net = model()
    sizes = {} if job else dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size"), BATCH
    )  # fmt: skip
    optimizers: Any = (None, None)
    if setting.ready:
        decayed = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.2, "lr": 0.02}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        optimizers = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    given: Any = {
        "args": arguments(folder, **setting.arguments, **sizes), "optimizers": optimizers,
        "train_dataset": Named(setting.count), "eval_dataset": Tokens(2 * BATCH),
    }  # fmt: skip
    made = JobTrainer(net, plan=plan(), **given) if job else Trainer(net, **given)
    made.train()
    logs = [{k: v for k, v in entry.items() if "loss" in k or k in KEPT}
            for entry in made.state.log_history]  # fmt: skip
    after = made.evaluate()["eval_loss"]
    if isinstance(made, JobTrainer):
        made.job.sync_to()
    return {"logs": logs, "after": after, "flos": made.state.total_flos,
            "weights": {n: p.detach().clone() for n, p in net.named_parameters()}}  # fmt: skip


KEPT = ("learning_rate", "epoch", "step", "num_input_tokens_seen")


@pytest.mark.sampled
@pytest.mark.parametrize("name", SETTINGS)
def test_arguments_that_work_do_what_they_do_without_a_job(tmp_path: Any, name: str) -> None:
    plan()  # before the fork: made once
    wanted = alone(outcome, tmp_path / "plain", SETTINGS[name], False)
    found = alone(outcome, tmp_path / "job", SETTINGS[name], True)
    assert len(found["logs"]) == len(wanted["logs"]) > 3
    for ours, theirs in zip(found["logs"], wanted["logs"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-6)
    assert found["after"] == pytest.approx(wanted["after"], rel=1e-5)
    assert found["flos"] == wanted["flos"]
    for path, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][path], value, rtol=2e-4, atol=2e-5, msg=path)


SAMPLES = {
    "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "fp16": True, "bf16": True,
    "fp16_full_eval": True, "bf16_full_eval": True, "activation_checkpointing": True,
    "gradient_checkpointing": True, "torch_compile": True, "use_liger_kernel": True,
    "auto_find_batch_size": True, "include_for_metrics": ["inputs"], "batch_eval_metrics": True,
    "save_on_each_node": True, "enable_jit_checkpoint": True, "push_to_hub": True,
    "parallelism_config": object(), "fsdp": ["full_shard"], "deepspeed": "zero.json",
    "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 5, "ddp_broadcast_buffers": True,
    "ddp_static_graph": True, "debug": ["underflow_overflow"],
    "optim": "galore_adamw_layerwise", "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 3,
    "train_sampling_strategy": "group_by_length",
}  # fmt: skip


def test_every_argument_is_in_a_table() -> None:
    known = WORKS | set(REFUSED) | set(DEPENDS)
    assert {f.name for f in fields(TrainingArguments)} <= known
    assert not (WORKS & set(REFUSED) or WORKS & set(DEPENDS) or set(REFUSED) & set(DEPENDS))
    given = {*SAMPLES, "load_best_model_at_end", "accelerator_config"}
    assert set(REFUSED) | set(DEPENDS) == given


@pytest.mark.parametrize(
    "name", [n for n in SAMPLES if n in TrainingArguments.__dataclass_fields__]
)
def test_what_would_be_ignored_is_refused_by_name(tmp_path: Any, name: str) -> None:
    made = arguments(tmp_path)
    check_arguments(made, plan())
    object.__setattr__(made, name, SAMPLES[name])
    with pytest.raises(PlanError, match=rf"cannot honour:\n  {name}: "):
        check_arguments(made, plan())


def test_what_is_refused_beside_others(tmp_path: Any) -> None:
    best = arguments(
        tmp_path, load_best_model_at_end=True, save_only_model=True, save_strategy="epoch",
        eval_strategy="epoch",
    )  # fmt: skip
    with pytest.raises(PlanError, match="load_best_model_at_end: the best weights"):
        check_arguments(best, plan())
    split = arguments(tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(PlanError, match="accelerator_config: split_batches: every rank"):
        check_arguments(split, plan())
    two = dataclasses.replace(plan(), precision="bf16-autocast")
    rounded = arguments(tmp_path)
    object.__setattr__(rounded, "bf16", True)
    check_arguments(rounded, two)


@dataclass
class Newer(TrainingArguments):
    """Of a later transformers."""

    shiny: int = field(default=0)


def test_an_argument_that_nobody_knows_is_refused_when_it_is_set(tmp_path: Any) -> None:
    check_arguments(Newer(str(tmp_path), use_cpu=True), plan())
    with pytest.raises(PlanError, match="shiny: meshwright does not know what 2 asks for"):
        check_arguments(Newer(str(tmp_path), use_cpu=True, shiny=2), plan())


def refusals(folder: Any) -> list[str]:
    """What is said of overrides, parts, callbacks and data, one after the other."""
    from meshwright.integrations.hf import JobTrainer

    class OwnLoss(JobTrainer):
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            raise AssertionError

    class OwnSampler(JobTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            raise AssertionError

    class Fine(JobTrainer):
        def log(self, *args: Any, **more: Any) -> None:
            super().log(*args, **more)

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

        def of_mine(self) -> int:
            return 1

    class Averaging(TrainerCallback):
        def on_step_end(self, *args: Any, model: Any = None, **more: Any) -> None:
            assert model.config.vocab_size == 32 and model.num_parameters() > 0
            list(model.parameters())

    def said(kind: Any = JobTrainer, **more: Any) -> str:
        given = {"args": arguments(folder, max_steps=1), "train_dataset": Tokens(BATCH), **more}
        try:
            kind(model(), plan=plan(), **given).train()
        except PlanError as error:
            return str(error)
        return "fine"

    own = Fine(model(), arguments(folder, max_steps=1), plan=plan(),
               train_dataset=Tokens(BATCH))  # fmt: skip
    own.train()
    assert own.of_mine() == 1 and own.state.log_history[0]["learning_rate"] == 0.5
    patched = JobTrainer(model(), arguments(folder), plan=plan())
    patched.compute_loss = lambda *args: None  # type: ignore[assignment]
    unlike = [{"input_ids": row, "labels": row.clone()} for row in Tokens(2 * BATCH).tokens]
    unlike[0]["labels"][:4] = -100
    two = arguments(folder, max_steps=1, gradient_accumulation_steps=2)
    found = [said(OwnLoss), said(OwnSampler), *_parts(said)]
    found += [said(callbacks=[Averaging()]), said(train_dataset=Tokens(BATCH + 1))]
    found += [said(args=two, train_dataset=unlike)]
    for act in (patched.train, lambda: patched.predict(Tokens(BATCH))):
        try:
            act()
        except PlanError as error:
            found.append(str(error))
    return found


def _parts(said: Any) -> list[str]:
    made = {"model_init": model}
    return [said(**{name: made.get(name, len)}) for name in PARTS if name != "model_init"]


REASONS = (
    r"OwnLoss overrides compute_loss: the plan is for the loss that the model itself returns",
    r"OwnSampler overrides _get_train_sampler: a job's Trainer does not call it",
    r"compute_loss_func: the plan is for the loss",
    r"compute_metrics: a job gives the loss only",
    r"preprocess_logits_for_metrics: a job gives the loss only",
    r"a callback asks for parameters of the model, which still has its weights from before",
    r"the training dataset has 5 samples.* leaves out the last 1, or give it 4",
    r"batches of one step have 25 to 28 labels that count",
    r"the trainer overrides compute_loss",
    r"predict: a job gives the loss only",
)


def test_overrides_parts_callbacks_and_data_are_refused_in_words(tmp_path: Any) -> None:
    plan()
    found = alone(refusals, tmp_path)
    assert len(found) == len(REASONS), found
    for text, reason in zip(found, REASONS, strict=True):
        with pytest.raises(PlanError, match=reason):
            raise PlanError(text)
