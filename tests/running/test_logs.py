"""Logs of a run: torchtitan's names, as JSON lines, for TensorBoard, W&B and MLflow."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.costmodel.explain.utilisation import Utilisation, step_flops
from meshwright.ir.errors import PlanError
from meshwright.running.log_writers import JSONL, TENSORBOARD, WRITERS
from meshwright.running.logs import parse_kinds
from meshwright.running.metrics import MetricNames, StepFigures
from meshwright.testing.spawn import run_ranks
from tests.integrations.setting import LR, batches, model, plan

NAMES = {
    "loss_metrics/global_avg_loss", "grad_norm", "lr", "n_tokens_seen", "throughput(tps)",
    "tflops", "time_metrics/end_to_end(s)", "time_metrics/data_loading(s)",
    "time_metrics/data_loading(%)", "memory/max_reserved(GiB)",
}  # fmt: skip


def test_rates_are_per_device():
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    graph = mw.trace(model(), {"input_ids": tokens, "labels": tokens})
    names = MetricNames(plan(), graph, torch.device("cpu"))
    figures = StepFigures(loss=2.0, step_s=0.5, data_s=0.1, learning_rate=LR, grad_norm=1.5)
    found = names.of(figures, 4)
    assert found.keys() == NAMES
    assert found["throughput(tps)"] == pytest.approx(4 * 8 / 0.5 / 2)
    assert found["tflops"] == pytest.approx(3 * sum(op.flops for op in graph.ops) / 1e12)
    assert found["time_metrics/data_loading(%)"] == pytest.approx(20)
    assert names.of(figures, 8)["n_tokens_seen"] == 2 * found["n_tokens_seen"] == 64


def test_mfu_is_the_share_of_the_peak():
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    graph = mw.trace(model(), {"input_ids": tokens, "labels": tokens})
    cluster = mw.Cluster.preset("a100-40", devices_per_node=2)
    use = Utilisation.on(plan(), cluster, 3e12)
    assert use.mfu(0.5) == pytest.approx(6e12 / (2 * cluster.device(0).peak("float64")))
    assert step_flops(graph) == 3 * sum(op.flops for op in graph.ops)
    assert f"{use.mfu(use.plan.predicted.step_s):.1%}" in use.sentence()


def _train(folder: str, kinds: str) -> list[float]:
    job = mw.compile(model(), plan(), optimizer="sgd", lr=LR, max_grad_norm=1.0, device="cpu")
    losses = []
    with mw.MetricLog(job, folder, kinds) as log:
        for batch in batches():
            loss = job.step(batch)
            log.step(loss)
            losses.append(float(loss))
    job.close()
    return losses


def test_a_loop_logs_json_lines(tmp_path):
    losses, _ = run_ranks(2, _train, str(tmp_path), "jsonl")
    rows = [json.loads(line) for line in (tmp_path / JSONL).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss_metrics/global_avg_loss"] for row in rows] == pytest.approx(losses)
    assert all(row.keys() == NAMES | {"step", "time"} for row in rows)


def test_a_loop_logs_for_tensorboard(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    losses, _ = run_ranks(2, _train, str(tmp_path), "jsonl,tensorboard")
    events = reader.EventAccumulator(str(tmp_path / TENSORBOARD))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    found = events.Scalars("loss_metrics/global_avg_loss")
    assert [event.step for event in found] == [1, 2, 3]
    assert [event.value for event in found] == pytest.approx(losses, rel=1e-6)


class _OneRun:
    """What wandb and mlflow have that logs use; MLflow's rule for names is its own."""

    def __init__(self) -> None:
        self.run, self.rows, self.calls = None, [], []

    def active_run(self):
        return self.run

    def init(self, **said):
        self.calls.append("begun")
        self.run = self
        return self

    start_run = init

    def log(self, metrics, step):
        self.rows.append((step, metrics))

    def log_metrics(self, metrics, step):
        assert all(re.fullmatch(r"[\w\-. :/]+", name) for name in metrics)
        self.log(metrics, step)

    def finish(self):
        self.calls.append("ended")

    end_run = finish


@pytest.mark.parametrize("open_already", [False, True])
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_loop_logs_into_the_run_that_is_open_or_its_own(
    tmp_path, monkeypatch, kind, open_already
):
    module = _OneRun()
    if open_already:
        module.run = module
    monkeypatch.setitem(sys.modules, kind, module)
    writer = WRITERS[kind](tmp_path)
    writer.write(3, {"throughput(tps)": 8.0, "mfu(%)": 41.0})
    writer.close()
    plain = {"throughput_tps": 8.0, "mfu_percent": 41.0}
    assert module.rows == [
        (3, plain if kind == "mlflow" else {"throughput(tps)": 8.0, "mfu(%)": 41.0})
    ]
    assert module.calls == ([] if open_already else ["begun", "ended"])


def test_a_logger_that_is_missing_is_told_with_its_package(tmp_path, monkeypatch):
    for kind in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, kind, None)
        with pytest.raises(PlanError, match=f"pip install {kind}, or log to jsonl"):
            WRITERS[kind](tmp_path)


def test_unknown_logs_are_refused(tmp_path: Path):
    assert parse_kinds("") == () and parse_kinds("jsonl, tensorboard") == ("jsonl", "tensorboard")
    with pytest.raises(PlanError, match="nearest is 'tensorboard'"):
        parse_kinds("jsonl,tensorbord")
