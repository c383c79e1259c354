"""A Trainer that trains with a job does what the plain loop does."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments

from meshwright.ir.errors import PlanError
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.testing.spawn import run_ranks
from tests.integrations.as_torchrun import as_torchrun
from tests.integrations.setting import LR, STEPS, Tokens, model, plain_loop, plan, weights_of

pytest.importorskip("accelerate")


def trainer(folder, accumulate=1, steps=STEPS, **more):
    from meshwright.integrations.hf import JobTrainer

    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=steps, learning_rate=LR, optim="sgd",
        gradient_accumulation_steps=accumulate, logging_steps=1, report_to=[], disable_tqdm=True,
        train_sampling_strategy="sequential", save_strategy="no", weight_decay=0.0, **more,
    )  # fmt: skip
    made = JobTrainer(
        model(), arguments, train_dataset=Tokens(4 * STEPS * accumulate), plan=plan(),
        eval_dataset=Tokens(4),
    )  # fmt: skip
    optimizer = made.optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
    made.lr_scheduler = schedule
    return made


def _train(folder, accumulate, max_grad_norm):
    as_torchrun()
    made = trainer(folder, accumulate, max_grad_norm=max_grad_norm)
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    before = made.evaluate()["eval_loss"]
    made.save_model(folder)
    found = {
        "losses": [entry["loss"] for entry in logs], "weights": weights_of(made.job),
        "rate": logs[-1]["learning_rate"], "norm": logs[-1].get("grad_norm"), "eval": before,
    }  # fmt: skip
    made.job.close()
    return found


@pytest.mark.parametrize(("accumulate", "max_grad_norm"), [(1, 0.1), (2, 0.0)])
def test_a_trainer_equals_the_plain_loop(tmp_path, accumulate, max_grad_norm):
    plan()  # before the fork: made once
    plain = run_ranks(2, plain_loop, accumulate, max_grad_norm or None)
    found = run_ranks(2, _train, str(tmp_path), accumulate, max_grad_norm)
    for ours, theirs in zip(plain, found, strict=True):
        losses = torch.tensor(ours["losses"]).view(-1, accumulate).mean(1)
        torch.testing.assert_close(torch.tensor(theirs["losses"]), losses, atol=1e-4, rtol=0)
        assert theirs["weights"].keys() == ours["weights"].keys()
        for name, values in ours["weights"].items():
            assert theirs["weights"][name] == pytest.approx(values, rel=1e-12), name
        assert theirs["rate"] == pytest.approx(LR * (1 - (STEPS - 1) / 8), rel=1e-6)
        assert (theirs["norm"] is not None) == bool(max_grad_norm)
    again = type(model()).from_pretrained(tmp_path, dtype=torch.float64)
    tokens = Tokens(4).tokens
    loss = again(input_ids=tokens, labels=tokens).loss.item()
    assert found[0]["eval"] == pytest.approx(loss, rel=1e-6)


def _resume(folder):
    as_torchrun()
    first = trainer(folder, steps=2, max_grad_norm=0.0)
    first.args.save_strategy = "steps"
    first.train()
    first._save_checkpoint(first.model, None)
    first.job.close()
    second = trainer(folder, max_grad_norm=0.0)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    weights = weights_of(second.job)
    second.job.close()
    return weights


def test_a_trainer_goes_on_from_its_checkpoint(tmp_path):
    plan()  # before the fork: made once
    plain = run_ranks(2, plain_loop)
    for ours, theirs in zip(plain, run_ranks(2, _resume, str(tmp_path)), strict=True):
        for name, values in ours["weights"].items():
            assert theirs[name] == pytest.approx(values, rel=1e-12), name


def _refused(folder):
    as_torchrun()
    with pytest.raises(PlanError, match="the plan decides"):
        trainer(folder, per_device_train_batch_size=16)
    dist.barrier()


def test_a_batch_size_that_is_not_the_plans_is_refused(tmp_path):
    plan()
    run_ranks(2, _refused, str(tmp_path))


class AskedAt(TrainerCallback):
    """As a batch system: a signal in the second step, to one rank."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _asked(folder, asked):
    as_torchrun()
    made = trainer(folder)
    if asked:
        made.add_callback(AskedAt())
    code = 0
    try:
        made.train()
    except SystemExit as error:
        code = error.code
    return code, [(entry["step"], entry["loss"]) for entry in made.state.log_history
                  if "loss" in entry], code or weights_of(made.job)  # fmt: skip


def test_a_trainer_that_is_asked_to_end_goes_on_when_it_is_started_again(tmp_path, monkeypatch):
    plan()
    whole = run_ranks(2, _asked, str(tmp_path / "whole"), False)
    first = run_ranks(2, _asked, str(tmp_path / "cut"), True)
    assert [code for code, *_ in first] == [RETRY, RETRY]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / "cut" / "checkpoint-9" / "job").mkdir(parents=True)  # killed while it saved
    second = run_ranks(2, _asked, str(tmp_path / "cut"), False)
    for (_, theirs, weights), (_, ours, again), (_, before, _) in zip(
        whole, second, first, strict=True
    ):
        assert before == theirs[: len(before)] and len(before) == 3
        assert ours == theirs, "the log is the Trainer's own, and has all steps"
        for name, values in weights.items():
            assert again[name] == pytest.approx(values, rel=1e-12), name
