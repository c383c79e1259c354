"""Where metrics can go: JSON lines, TensorBoard, Weights & Biases, MLflow."""

import importlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.ir.errors import PlanError

JSONL = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Writer(Protocol):
    """One place."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _JsonLines:
    def __init__(self, folder: Path) -> None:
        self._file = (folder / JSONL).open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {"step": step, "time": time.time(), **metrics}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        module = _package("torch.utils.tensorboard", "'meshwright[tensorboard]'")
        self._writer = module.SummaryWriter(str(folder / TENSORBOARD))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Into the run that is open in this process, else one of its own, below the folder."""

    def __init__(self, folder: Path) -> None:
        module = _package("wandb", "wandb")
        self._opened = module.run is None
        self._run = module.init(dir=str(folder)) if self._opened else module.run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._opened:
            self._run.finish()


class _MLflow:
    """Into the run that is open in this process, else one of its own, where MLflow's own settings
    say. MLflow takes no brackets and no %: `mfu(%)` is `mfu_percent` there."""

    def __init__(self, folder: Path) -> None:
        self._module = _package("mlflow", "mlflow")
        self._opened = self._module.active_run() is None
        if self._opened:
            self._module.start_run(run_name=folder.name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log_metrics({_plain(name): metrics[name] for name in metrics}, step=step)

    def close(self) -> None:
        if self._opened:
            self._module.end_run()


def _plain(name: str) -> str:
    return name.replace("%", "percent").replace("(", "_").replace(")", "")


def _package(module: str, install: str) -> Any:
    """A logger's module; PlanError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlanError(
            f"logs need the package {module!r}: pip install {install}, or log to jsonl"
        ) from error


WRITERS: Mapping[str, Callable[[Path], Writer]] = {
    "jsonl": _JsonLines,
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
