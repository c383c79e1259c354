"""The links among ranks that hold the same parameters, and how many ranks there are."""

from dataclasses import dataclass

from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.forms.exchange_rows import Axis
from meshwright.ir.plan.plan import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLines:
    """Of some parameters of a stage: those of replicas, with axes that are folded for them."""

    dp: Levels = ()
    shard: Levels = ()
    copies: Levels = ()
    ranks: int = 1
    """Of all of dp."""
    shards: int = 1
    """Of dp_shard."""

    def levels(self, axis: Axis) -> Levels:
        """Returns the links of an axis of replicas."""
        if axis == "dp":
            return self.dp
        return self.shard if axis == "dp_shard" else self.copies


ALONE = ReplicaLines()


def lines_in(tables: CostTables, view: Stage) -> ReplicaLines:
    """Returns the lines of a stage as it is for some parameters; those of its first ranks, as all
    are alike."""
    shards = view.mesh.get("dp_shard", 1)
    return lines_among(tables, view.devices, view.model_size, view.dp, shards)


def lines_among(
    tables: CostTables, devices: tuple[int, ...], width: int, ranks: int, shards: int
) -> ReplicaLines:
    """Returns the lines of `ranks` replicas of `width` devices each, `shards` of which share."""
    return ReplicaLines(
        dp=tables.levels(devices[::width]),
        shard=tables.levels(devices[: shards * width : width]),
        copies=tables.levels(devices[:: shards * width]),
        ranks=ranks, shards=shards,
    )  # fmt: skip
