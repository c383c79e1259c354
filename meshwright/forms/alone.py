"""Replicas that train alone: which ranks each has, and how much later they hear of each other."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.forms.sync import exchange_of
from meshwright.ir.plan.lines import Line
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.precision import precision


class LoneReplicas(NamedTuple):
    """Replicas of a plan that wait for nothing of each other in a step."""

    lines: tuple[Line, ...]
    """The ranks of each replica, of all stages, ascending."""
    shares: tuple[int, ...]
    """Samples of a micro-batch that each has."""
    lag: int
    """Steps after which a replica is to have heard of what the others did, at least 1."""

    def of(self, rank: int) -> int:
        """Returns the number of a rank's replica."""
        return next(number for number, line in enumerate(self.lines) if rank in line)


def lone_replicas(plan: Plan) -> LoneReplicas | None:
    """Returns the replicas of a plan that hear late of each other; None: ranks of all of them meet
    in each step, as gradients of some parameters are of all, averages are taken in at once, stages
    have other replicas, or all have one scale of the loss."""
    if precision(plan.precision).scales_loss:
        return None
    lags = [_lag(view) for stage in plan.stages for view in views_of(stage)]
    shares = {_shares(stage) for stage in plan.stages}
    lag = min(lags)
    if not lag or len(shares) > 1:
        return None
    found = shares.pop()
    parts = [list(_parts(stage, len(found))) for stage in plan.stages]
    lines = [tuple(sorted({r for own in parts for r in own[n]})) for n in range(len(found))]
    if sum(map(len, lines)) != plan.world_size:
        return None
    return LoneReplicas(tuple(lines), found, lag)


def _lag(view: Stage) -> int:
    """After how many steps an average is taken in; 0: replicas agree in each step."""
    exchange = exchange_of(view)
    return min([send.lag for send in exchange.lagging], default=0) if exchange.apart else 0


def _shares(stage: Stage) -> tuple[int, ...]:
    shards = stage.mesh.get("dp_shard", 1)
    return tuple([
        sum(stage.batch_shares[i : i + shards]) for i in range(0, len(stage.batch_shares), shards)
    ])  # fmt: skip


def _parts(stage: Stage, replicas: int) -> Iterator[Line]:
    """The ranks of each replica: dp_replicate is the outermost axis."""
    size = len(stage.devices) // replicas
    for n in range(replicas):
        yield stage.devices[n * size : (n + 1) * size]


def replica_lines(plan: Plan) -> tuple[Line, ...]:
    """Returns sets of ranks that need a group for what a replica finds alone: its loss, and whether
    its step is left out."""
    alone = lone_replicas(plan)
    return () if alone is None else tuple([line for line in alone.lines if len(line) > 1])
