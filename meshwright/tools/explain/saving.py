"""What saving a job costs, and how often to do it: of a plan and its machines, before it is run."""

from dataclasses import dataclass
from typing import Self

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.host import link_rate
from meshwright.ir.faults.mix import LLAMA_3
from meshwright.ir.faults.saving import SavingCost
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.ir.text.units import size


@dataclass(frozen=True, slots=True)
class PlannedSaves:
    """Saves that are written beside training, at the interval by which least time is lost."""

    copied_bytes: int
    """By the rank that has most of parameters and optimizer state, onto its host; where replicas
    hold the same, not all of them do so."""
    held_s: float
    """What that holds up training."""
    between_s: float
    """Mean time between failures, if devices fail as often as in Llama 3's training."""
    interval_s: float
    """From one save to the next, if each is whole by then."""
    lost: float
    """Share of the time that saves and the work between the last one and a failure take."""

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> Self:
        """Of a plan with a prediction."""
        assert plan.predicted is not None
        most, held_s = 0, 0.0
        for stage, known in zip(plan.stages, plan.predicted.stages, strict=True):
            copied = known.memory.parameters_bytes + known.memory.optimizer_bytes
            kinds = {cluster.device(rank).name: cluster.device(rank) for rank in stage.devices}
            for device in kinds.values():
                rate = link_rate(device) if device.is_apart else device.memory_bandwidth_bytes_per_s
                most, held_s = max(most, copied), max(held_s, copied / rate)
        cost = SavingCost(held_s=held_s, write_s=0.0, between_s=LLAMA_3.between_s(plan.world_size))
        return cls(most, held_s, cost.between_s, cost.interval_s, cost.lost(cost.interval_s))

    @property
    def text(self) -> str:
        """For people."""
        rate = size(round(self.copied_bytes / self.interval_s))
        return (
            f"a save copies {size(self.copied_bytes)} of the fullest rank to its host, "
            f"{seconds(self.held_s)} by the link alone; if devices fail as in Llama 3's training, "
            f"one of these each {_long(self.between_s)}, a save each {_long(self.interval_s)} "
            f"loses least ({self.lost:.1%} of the time), where {rate}/s a rank can be written; "
            "--save-every auto measures both and does so"
        )


def _long(value_s: float) -> str:
    for unit, scale in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value_s >= 2 * scale:
            return f"{value_s / scale:.3g} {unit}"
    return seconds(value_s)
