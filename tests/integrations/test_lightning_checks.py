"""What a LightningModule, its callbacks and its Trainer ask for works with a job, or is refused."""

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import alone

lightning = pytest.importorskip("lightning")
environments = pytest.importorskip("lightning.pytorch.plugins.environments")
DoublePrecision = pytest.importorskip("lightning.pytorch.plugins").DoublePrecision
BATCH, WIDTH, LR = 4, 6, 0.05


class Net(nn.Module):
    """Gives its loss, and what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.last(torch.tanh(self.first(x)))
        return {"loss": (out - y).square().mean(), "out": out}


class Bare(Net):
    """Gives what it predicts only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(torch.tanh(self.first(x)))


def square(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(BATCH, WIDTH, generator=generator) for name in "xy"}
        for _ in range(count)
    ]


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(batches(count), batch_size=None)  # type: ignore[arg-type]


@cache
def plan(loss_fn: Any = None) -> Plan:
    graph = (
        mw.trace(Net(), batches(1)[0])
        if loss_fn is None
        else mw.trace(Bare(), tuple(batches(1)[0].values()), loss_fn)
    )
    problem = make_problem(graph, mw.Cluster.local(1), precision="fp32")
    return build_plan(problem, uniform_choice(problem))


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = Net() if model is None else model
        self.outputs: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch)["loss"]
        self.log("train", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "index": index}

    def validation_step(self, batch: Any, index: int) -> None:
        self.log_dict({"val": self.model(**batch)["loss"], "index": float(index)})

    def test_step(self, batch: Any, index: int) -> None:
        self.log("tested", self.model(**batch)["loss"])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.outputs.append(float(outputs["loss"]) + outputs["index"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Overriding(Module):
    """With hooks that Lightning calls as always."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + index)
        optimizer.step(closure=closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.outputs.append(-1.0)


class Unscheduled(Module):
    """Where nothing is logged that a schedule could look at."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=LR)


def fit(folder: Any, module: Any, strategy: Any, *, steps: int = 5, **more: Any) -> Any:
    given = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, **more}
    made = lightning.Trainer(
        strategy=strategy, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=str(folder), **given,
    )  # fmt: skip
    made.fit(module, loader(steps), loader(2))
    return made


def outcome(folder: Any, kind: Any, job: bool, more: dict[str, Any]) -> dict[str, Any]:
    """What was logged, what hooks saw, and the weights."""
    from meshwright.integrations.lightning import JobStrategy

    strategy = JobStrategy(plan()) if job else "auto"
    module = kind()
    if "starts" in more:
        schedule = lightning.pytorch.callbacks.GradientAccumulationScheduler(more["starts"])
        more = {"callbacks": [schedule]}
    made = fit(folder, module, strategy, **more)
    logged = {k: float(v) for k, v in made.callback_metrics.items()}
    rate = made.optimizers[0].param_groups[0]["lr"]
    tested = made.test(module, loader(2), verbose=False)[0]
    if isinstance(strategy, JobStrategy):
        assert strategy.job is not None
        strategy.job.sync_to()
    weights = {n: p.detach().clone() for n, p in module.model.named_parameters()}
    return {"logged": logged, "seen": module.outputs, "rate": rate, "tested": tested,
            "weights": weights}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Module, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Overriding, {"gradient_clip_val": 0.0, "log_every_n_steps": 1}),
        (Module, {"starts": {0: 1, 1: 3}}),
    ],
    ids=["accumulated", "overridden", "scheduled"],
)
def test_a_module_does_what_it_does_without_a_job(
    tmp_path: Any, kind: Any, more: dict[str, Any]
) -> None:
    plan()  # before the fork: made once
    wanted = alone(outcome, tmp_path, kind, False, more)
    found = alone(outcome, tmp_path, kind, True, more)
    for name in ("logged", "seen", "rate", "tested"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name
    for path, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][path], value, rtol=1e-5, atol=1e-6, msg=path)


FLAGS: dict[str, dict[str, Any]] = {
    "limits": {
        "limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 1, "max_steps": 5,
        "min_epochs": 1, "min_steps": 1, "max_time": {"hours": 1}, "val_check_interval": 2,
        "num_sanity_val_steps": 1, "reload_dataloaders_every_n_epochs": 1, "profiler": "simple",
        "log_every_n_steps": 1, "deterministic": True, "benchmark": False, "inference_mode": False,
        "use_distributed_sampler": False, "detect_anomaly": True, "enable_autolog_hparams": False,
        "check_val_every_n_epoch": 1,
    },
    "dev": {"fast_dev_run": 2},
    "overfit": {"overfit_batches": 2},
    "bare": {"barebones": True, "max_epochs": 1},
}  # fmt: skip


def flagged(folder: Any, job: bool) -> dict[str, Any]:
    """Of each set of flags what was logged, what hooks saw, and how many steps were taken."""
    from meshwright.integrations.lightning import JobStrategy

    found = {}
    for name, flags in FLAGS.items():
        module = Unscheduled() if "barebones" in flags else Module()
        made = fit(folder, module, JobStrategy(plan()) if job else "auto", **flags)
        logged = {key: float(value) for key, value in made.callback_metrics.items()}
        found[name] = [logged, module.outputs, made.global_step]
    return found


def test_every_flag_of_a_trainer_works_or_is_refused(tmp_path: Any) -> None:
    from meshwright.integrations.lightning_checks import DEPENDS, WORKS

    flags = set(inspect.signature(lightning.Trainer).parameters)
    assert flags <= WORKS | set(DEPENDS) and not WORKS & set(DEPENDS)
    assert set(DEPENDS) == {of for _, _, of in TRAINERS.values()} | {
        "devices",
        "val_check_interval",
    }
    plan()
    wanted, found = alone(flagged, tmp_path, False), alone(flagged, tmp_path, True)
    for name in FLAGS:
        for ours, theirs in zip(found[name], wanted[name], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
    assert [steps for *_, steps in found.values()] == [5, 2, 4, 5]


def test_nodes_are_counted_as_torchrun_says(monkeypatch: Any) -> None:
    from meshwright.integrations.lightning_checks import DEPENDS

    for name, value in {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    said = [DEPENDS["num_nodes"](SimpleNamespace(num_nodes=n), plan()) for n in (1, 2, 3)]  # type: ignore[arg-type]
    assert said[:2] == ["", ""] and "torchrun has started 2" in said[2]


def test_ranks_do_not_validate_by_their_own_clocks() -> None:
    from meshwright.integrations.lightning_checks import DEPENDS

    made = lightning.Trainer(val_check_interval={"minutes": 1}, accelerator="cpu", logger=False)
    two: Any = SimpleNamespace(world_size=2)
    check = DEPENDS["val_check_interval"]
    assert not check(made, plan())
    assert "val_check_interval of 60 s: each rank looks at its own clock" in check(made, two)
    assert "devices=2: each rank trains with one" in DEPENDS["devices"](
        lightning.Trainer(devices=2, accelerator="cpu", logger=False), plan()
    )


def step_of(name: str) -> Any:
    """A module whose training step does something else."""

    def doubled(self: Any, batch: Any, index: int) -> Any:
        return 2 * self.model(**batch)["loss"]

    def predicting(self: Any, batch: Any, index: int) -> Any:
        return self.model(**batch)["out"].mean()

    def predicting_too(self: Any, batch: Any, index: int) -> Any:
        return self.model(**batch).logits

    def idle(self: Any, batch: Any, index: int) -> Any:
        return torch.zeros(())

    def twice(self: Any, batch: Any, index: int) -> Any:
        self.model(**batch)
        return self.model(**batch)["loss"]

    def nothing(self: Any, batch: Any, index: int) -> Any:
        self.model(**batch)

    return type("Module", (Module,), {"training_step": locals()[name]})


STEPS = {
    "doubled": r"Module.training_step returns .*, and the loss of the model is",
    "predicting": r"asks for 'out' of what the model returns, and a job gives the loss only",
    "predicting_too": r"asks for 'logits' of what the model returns",
    "idle": r"calls its model 0 times",
    "twice": r"calls its model 2 times",
    "nothing": r"training_step returns NoneType",
}
HOOKS = {
    "backward": "gradients are the job's", "on_before_backward": "gradients are",
    "on_after_backward": "gradients are", "on_before_optimizer_step": "gradients are",
    "configure_gradient_clipping": "the job clips", "clip_gradients": "the job clips",
    "optimizer_zero_grad": "the job clears", "predict_step": "a job gives the loss only",
    "on_before_batch_transfer": "the job takes to the device", "manual_backward": "gradients are",
    "transfer_batch_to_device": "the job takes", "on_after_batch_transfer": "the job takes",
    "toggle_optimizer": "a job's strategy does not call it",
}  # fmt: skip
TRAINERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "sync_batchnorm": ({"sync_batchnorm": True}, "sync_batchnorm: a job's b", "sync_batchnorm"),
    "precision": (
        {"precision": "64-true"}, "precision '64-true': the plan computes in fp32", "precision",
    ),
    "value": (
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "gradient_clip_algorithm 'value'", "gradient_clip_algorithm",
    ),
    "nodes": ({"num_nodes": 2}, "num_nodes=2: torchrun has started 1; leave it out", "num_nodes"),
    "environment": (
        {"plugins": [environments.LightningEnvironment()]},
        "plugins LightningEnvironment: torchrun says which rank this is", "plugins",
    ),
    "rounding": (
        {"plugins": [DoublePrecision()]}, "plugins DoublePrecision: the plan says", "plugins",
    ),
}  # fmt: skip
"""Arguments, what is said of them, and of which."""


def refusals(folder: Any) -> dict[str, str]:
    """What is said of each."""
    from lightning.pytorch import callbacks

    from meshwright.integrations.lightning import JobStrategy

    def said(module: Any, strategy: Any = None, **more: Any) -> str:
        try:
            fit(folder, module, strategy or JobStrategy(plan()), steps=1, max_epochs=1, **more)
        except PlanError as error:
            return str(error)
        return "fine"

    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Watching(callbacks.Callback):
        def on_after_backward(self, *args: Any) -> None:
            raise AssertionError

    found = {name: said(step_of(name)()) for name in STEPS}
    for hook in HOOKS:
        found[hook] = said(type("Own", (Module,), {hook: lambda *args, **more: None})())
    found |= {name: said(Module(), **more) for name, (more, *_) in TRAINERS.items()}
    found["manual"] = said(Manual())
    found["average"] = said(Module(), callbacks=[callbacks.StochasticWeightAveraging(0.1)])
    found["watching"] = said(Module(), callbacks=[Watching()])
    found["loss_fn"] = said(Module(Bare()), JobStrategy(plan(square), loss_fn=square))
    try:
        made = fit(folder, Module(), JobStrategy(plan()), steps=1, max_epochs=1)
        made.predict(type("Calling", (Module,), {"forward": lambda *args: None})(), loader(1))
    except PlanError as error:
        found["predict"] = str(error)
    return found


def test_what_a_job_cannot_do_is_refused_in_words(tmp_path: Any) -> None:
    plan(), plan(square)
    found = alone(refusals, tmp_path)
    wanted = STEPS | {name: f"Own overrides {name}: {why}" for name, why in HOOKS.items()}
    wanted |= {name: why for name, (_, why, _) in TRAINERS.items()}
    wanted |= {
        "manual": "automatic_optimization is False", "predict": "predict: a job gives the loss",
        "average": "callback StochasticWeightAveraging: weights are the job's",
        "watching": "callback Watching overrides on_after_backward: gradients are the job's",
        "loss_fn": r"the job computes the loss: write `loss = job_step\(self, batch\)`",
    }  # fmt: skip
    assert found.keys() == wanted.keys()
    for name, reason in wanted.items():
        with pytest.raises(PlanError, match=reason):
            raise PlanError(found[name])


def _with_loss_fn(folder: Any) -> list[float]:
    from meshwright.integrations.lightning import JobStrategy, job_step

    class Stepping(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = job_step(self, batch)
            self.log("train", loss)
            return loss

        validation_step = None

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.outputs.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=LR)

    data = [tuple(batch.values()) for batch in batches(3)]
    module = Stepping(Bare())
    made = lightning.Trainer(
        strategy=JobStrategy(plan(square), loss_fn=square), accelerator="cpu", devices=1,
        max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    made.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert "train" in made.callback_metrics
    return module.outputs


def test_a_step_with_a_loss_function_calls_the_job(tmp_path: Any) -> None:
    plan(square)
    net, wanted = Bare(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for batch in batches(3):
        loss = square(net(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert alone(_with_loss_fn, tmp_path) == pytest.approx(wanted, rel=1e-5)
