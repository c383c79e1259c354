"""The end of a step, for a job and for a dry run: what follows the last backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.forms.running import Update
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.step.gradients import scaled, sum_over_model
from meshwright.runtime.step.tied import sum_ties
from meshwright.runtime.step.updates import FormOptimizer


@dataclass(frozen=True, eq=False)
class StepEnd:
    """Makes gradients whole, limits them and steps the optimizer; all ranks in this order."""

    parts: RankParts
    optimizer: torch.optim.Optimizer
    device: torch.device
    world_size: int

    def sum_gradients(self) -> None:
        """Makes each held gradient the sum of all parts; after the last batch of a step."""
        parts = self.parts
        for index, stage in parts.stages.items():
            stage.sync.finish()
            sum_over_model(stage.sync.reduced, parts.lines[index])
        sum_ties(parts.ties, parts.reduced, parts.groups, parts.rank)

    def scale_gradients(self, factor: float, max_norm: float | None) -> Tensor | None:
        """Multiplies the gradients, and limits their norm to `max_norm`; returns the norm before
        that, or None if there is no limit."""
        reduced = self.parts.reduced
        return scaled(
            self.optimizer, reduced, self.parts.counted(reduced), factor, max_norm, self.device,
            self.world_size,
        )  # fmt: skip

    def update(self) -> None:
        """Steps the optimizer with the gradients as they are, and hands on what it made."""
        section = self.parts.recorder.section
        with section("optimizer"):
            self.optimizer.step()
        with section("publish"):
            for stage in self.parts.stages.values():
                stage.sync.updated(self._later)

    def _later(self) -> Update:
        """How to step parameters whose gradients come after the step, with its settings."""
        optimizer = self.optimizer
        settings = [_settings(group) for group in optimizer.param_groups]
        factor = optimizer.factor if isinstance(optimizer, FormOptimizer) else None

        def update(parameters: Sequence[Tensor]) -> None:
            wanted = {id(p) for p in parameters}
            groups = optimizer.param_groups
            now = [dict(group) for group in groups]
            for group, then in zip(groups, settings, strict=True):
                group.update(then, params=[p for p in group["params"] if id(p) in wanted])
            if isinstance(optimizer, FormOptimizer):
                optimizer.factor = factor
            try:
                optimizer.step()
            finally:
                for group, before in zip(groups, now, strict=True):
                    group.update(before)

        return update


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group of parameters, as they are now."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items() if key != "params"
    }  # fmt: skip
