"""The end of a step, for a job and for a dry run: what follows the last backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.runtime.build import RankParts
from meshwright.runtime.gradients import scaled, sum_over_model
from meshwright.runtime.tied import sum_ties


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
            sum_over_model(stage.sync.held, parts.lines[index])
        sum_ties(parts.ties, parts.held, parts.groups, parts.rank)

    def scale_gradients(self, factor: float, max_norm: float | None) -> Tensor | None:
        """Multiplies the gradients, and limits their norm to `max_norm`; returns the norm before
        that, or None if there is no limit."""
        return scaled(
            self.optimizer, self.parts.held, self.parts.counted, factor, max_norm, self.device,
            self.world_size,
        )  # fmt: skip

    def update(self) -> None:
        """Steps the optimizer with the gradients as they are, and hands on what it made."""
        section = self.parts.recorder.section
        with section("optimizer"):
            self.optimizer.step()
        with section("publish"):
            for stage in self.parts.stages.values():
                stage.sync.publish()
