"""The end of a step, for a job and for a dry run: what follows the last backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.forms.running import LaterStep
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.step.gradients import scaled, sum_over_model
from meshwright.runtime.step.later_update import LaterUpdate
from meshwright.runtime.step.some_rows import by_row, rows_only
from meshwright.runtime.step.tied import sum_ties


@dataclass(eq=False)
class StepEnd:
    """Makes gradients whole, limits them and steps the optimizer; all ranks in this order."""

    parts: RankParts
    optimizer: torch.optim.Optimizer
    device: torch.device
    world_size: int
    factor: Tensor | float = 1.0
    """By which gradients of the step were scaled, but for a limit of their norm."""

    def __post_init__(self) -> None:
        for stage in self.parts.stages.values():
            stage.sync.watch(lambda tensor: by_row(self.optimizer, tensor))

    def sum_gradients(self) -> None:
        """Makes each held gradient the sum of all parts; after the last batch of a step."""
        parts = self.parts
        for index, stage in parts.stages.items():
            stage.sync.finish()
            if parts.ties:  # copies have gradients of other rows
                stage.sync.spread()
            sum_over_model(stage.sync.reduced, parts.lines[index])
        sum_ties(parts.ties, parts.reduced, parts.groups, parts.rank)
        for stage in parts.stages.values():
            stage.sync.leave()

    def scale_gradients(self, factor: Tensor | float, max_norm: float | None) -> Tensor | None:
        """Multiplies the gradients, and limits their norm to `max_norm`; returns the norm before
        that, or None if there is no limit."""
        reduced, self.factor = self.parts.reduced, factor
        return scaled(
            self.optimizer, reduced, self.parts.counted(reduced), factor, max_norm, self.device,
            self.world_size,
        )  # fmt: skip

    def update(self) -> None:
        """Steps the optimizer with the gradients as they are, and hands on what it made."""
        section = self.parts.recorder.section
        with section("optimizer"):
            syncs = [stage.sync for stage in self.parts.stages.values()]
            with rows_only(self.optimizer, syncs):
                self.optimizer.step()
        with section("publish"):
            for stage in self.parts.stages.values():
                stage.sync.updated(self._later)

    def _later(self) -> LaterStep:
        """How to step parameters whose gradients come after the step, with its settings."""
        return LaterUpdate(self.optimizer, self.factor)
