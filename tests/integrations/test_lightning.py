"""A Lightning Trainer with a job's strategy does what the plain loop does."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from meshwright.ir.errors import PlanError
from meshwright.runtime.world.exit_codes import RETRY
from meshwright.testing.spawn import run_ranks
from tests.integrations.as_torchrun import as_torchrun
from tests.integrations.setting import BATCH, LR, STEPS, Tokens, model, plain_loop, plan, weights_of

lightning = pytest.importorskip("lightning")


def module():
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()
            self.seen = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.log("train_loss", loss, prog_bar=True)
            self.log("twice", 2 * loss)
            return {"loss": loss, "index": index}

        def validation_step(self, batch, index):
            self.log("val_loss", self.model(**batch)["loss"])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_train_batch_end(self, outputs, batch, index):
            self.seen.append(float(outputs["loss"]))

    return Module()


def trainer(folder, strategy, accumulate=1, steps=STEPS, **more):
    return lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, logger=False,
        accumulate_grad_batches=accumulate, enable_progress_bar=False, default_root_dir=folder,
        enable_checkpointing=False, enable_model_summary=False, **more,
    )  # fmt: skip


def loader(count):
    return DataLoader(Tokens(count), BATCH)


def _train(folder, accumulate, max_grad_norm):
    as_torchrun()
    from meshwright.integrations.lightning import JobStrategy

    strategy, net = JobStrategy(plan()), module()
    made = trainer(folder, strategy, accumulate, gradient_clip_val=max_grad_norm)
    made.fit(net, loader(BATCH * STEPS * accumulate), loader(BATCH))
    found = {
        "losses": net.seen, "weights": weights_of(strategy.job),
        "logged": {name: float(value) for name, value in made.callback_metrics.items()},
    }  # fmt: skip
    strategy.job.close()
    return found


@pytest.mark.parametrize(("accumulate", "max_grad_norm"), [(1, 0.1), (2, None)])
def test_a_strategy_equals_the_plain_loop(tmp_path, accumulate, max_grad_norm):
    plan()  # before the fork: made once
    plain = run_ranks(2, plain_loop, accumulate, max_grad_norm)
    found = run_ranks(2, _train, str(tmp_path), accumulate, max_grad_norm)
    for ours, theirs in zip(plain, found, strict=True):
        assert [x * accumulate for x in theirs["losses"]] == pytest.approx(ours["losses"]) or (
            theirs["losses"] == pytest.approx(ours["losses"])
        )
        for name, values in ours["weights"].items():
            assert theirs["weights"][name] == pytest.approx(values, rel=1e-12), name
        logged = theirs["logged"]
        assert logged["train_loss"] == pytest.approx(ours["losses"][-1])
        assert logged["twice"] == pytest.approx(2 * ours["losses"][-1])
        assert logged["val_loss"] > 0


def _resume(folder):
    as_torchrun()
    from meshwright.integrations.lightning import JobStrategy

    first = JobStrategy(plan())
    made = trainer(folder, first, steps=2)
    made.fit(module(), loader(BATCH))
    made.save_checkpoint(f"{folder}/step2")
    first.job.close()
    second = JobStrategy(plan())
    trainer(folder, second).fit(module(), loader(BATCH), ckpt_path=f"{folder}/step2")
    weights = weights_of(second.job)
    second.job.close()
    return weights


def test_a_strategy_goes_on_from_its_checkpoint(tmp_path):
    """An epoch is one batch: Lightning begins the epoch again in which it was stopped."""
    plan()  # before the fork: made once
    plain = run_ranks(2, plain_loop, 1, None, True)
    for ours, theirs in zip(plain, run_ranks(2, _resume, str(tmp_path)), strict=True):
        for name, values in ours["weights"].items():
            assert theirs[name] == pytest.approx(values, rel=1e-12), name


class AskedIn(lightning.Callback):
    """As a batch system: a signal in the second step, to one rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


class Fails(lightning.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        raise ArithmeticError("as it may")


def _asked(folder):
    as_torchrun()
    from meshwright.integrations.lightning import JobStrategy
    from meshwright.integrations.lightning_leaves import JobLeaves

    with pytest.raises(ArithmeticError):
        callbacks = [JobLeaves(f"{folder}/left"), Fails()]
        trainer(folder, JobStrategy(plan()), callbacks=callbacks).fit(module(), loader(BATCH))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "signals are the process's again"
    first, leaves = JobStrategy(plan()), JobLeaves(f"{folder}/left", every=1, keep=2)
    made = trainer(folder, first, steps=STEPS, callbacks=[AskedIn(), leaves])
    with pytest.raises(SystemExit) as left:
        made.fit(module(), loader(BATCH), ckpt_path=leaves.newest())
    second = JobStrategy(plan())
    trainer(folder, second).fit(module(), loader(BATCH), ckpt_path=leaves.newest())
    weights = weights_of(second.job)
    second.job.close()
    return left.value.code, sorted(path.name for path in leaves.folder.iterdir()), weights


def test_a_trainer_that_is_asked_to_end_saves_and_goes_on(tmp_path):
    plan()
    plain = run_ranks(2, plain_loop, 1, None, True)
    for ours, found in zip(plain, run_ranks(2, _asked, str(tmp_path)), strict=True):
        code, names, weights = found
        assert code == RETRY
        assert names == ["asked-00000002.ckpt", "asked-00000003.ckpt"], "each step, two kept"
        for key, values in ours["weights"].items():
            assert weights[key] == pytest.approx(values, rel=1e-12), key


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _resume_evil(folder):
    as_torchrun()
    from meshwright.integrations.lightning import JobStrategy

    ran = f"{folder}/ran{os.environ['RANK']}"
    strategy = JobStrategy(plan())
    made = trainer(folder, strategy, steps=1)
    made.fit(module(), loader(BATCH))
    made.save_checkpoint(f"{folder}/step1")
    if strategy.is_global_zero:
        torch.save({"callbacks": Evil(ran)}, f"{folder}/step1/lightning.ckpt")
    strategy.barrier()
    with pytest.raises(PlanError, match=r"it was not run\. If you trust"):
        again = trainer(folder, JobStrategy(plan()))
        again.fit(module(), loader(BATCH), ckpt_path=f"{folder}/step1")
    return os.path.exists(ran)


def test_what_lightning_keeps_runs_no_code(tmp_path):
    plan()  # before the fork: made once
    assert run_ranks(2, _resume_evil, str(tmp_path)) == [False, False]
