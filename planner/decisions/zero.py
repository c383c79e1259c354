"""What is sharded over dp_shard: 1 optimizer state, 2 also gradients, 3 also parameters."""

from collections.abc import Iterable, Iterator
from functools import cache

from meshwright.forms.exchange import Exchange
from meshwright.forms.folding import folded_views
from meshwright.forms.sync import chosen, exchange, goes_with, stored_exchange, suits
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan, Stage, sync_name
from meshwright.planner.decisions.store import pinned_store
from meshwright.planner.pins.constraints import allowed, pinned
from meshwright.planner.pins.decision import Decision, Machinery
from meshwright.planner.pins.decisions import Constraint

LEVELS = (0, 1, 2, 3)


@cache
def splits(level: int) -> bool:
    """Return whether a level splits something among the ranks of dp_shard."""
    return exchange(sync_name(level, 2), 2).is_split("optimizer")


def levels(
    constraints: Iterable[Constraint], dp: int, shard: int, *, folded: int = 1
) -> tuple[int, ...]:
    """Return the levels that pins leave for so many replicas, of which so many share: those that
    split something where there is somebody to share with. `folded`: ranks of a replica that may
    share, too (`ir.plan.folded`)."""
    asked = tuple(constraints)
    found = tuple(n for n in LEVELS if splits(n) == (shard > 1) or (folded > 1 and splits(n)))
    if shard > 1 and (pinned(asked, "dp_shard") or 0) == shard:
        found = LEVELS  # asked for by name: also without sharding anything
    store = pinned_store(asked)
    if store:
        found = tuple(n for n in found if goes_with(sync_name(n, shard), dp, n, store))
    if 0 not in allowed(asked, "prefetch", range(5)):
        among = dp * folded, shard * folded
        found = tuple(n for n in found if _exchange(n, *among, store).fetches_ahead)
    sync = pinned(asked, "sync")
    left = tuple(level for level in found if sync not in chosen() or suits(str(sync), level))
    return allowed(asked, "zero", left)


def _exchange(level: int, dp: int, shard: int, store: str) -> Exchange:
    name = sync_name(level, shard)
    return stored_exchange(name, dp, level, store) if store else exchange(name, dp)


def _findings(plan: Plan) -> Iterator[Finding]:
    for i, stage in enumerate(plan.stages):
        if splits(stage.zero) and not any(view.is_sharded for view in folded_views(stage)):
            message = f"stage {i}: zero {stage.zero} shards over dp_shard, which is 1"
            yield Finding("zero", message, "zero 0", "warning")


def _used(plan: Plan) -> list[int]:
    return sorted({stage.zero for stage in plan.stages if splits(stage.zero)})


def _mesh(plan: Plan) -> str:
    return "zero" + "/".join(map(str, _used(plan))) if _used(plan) else ""


def _show(stage: Stage) -> str:
    return f"{stage.zero}, {stage.prefetch} ahead" if stage.prefetch else str(stage.zero)


DECISION = Decision(
    least=min(LEVELS),
    most=max(LEVELS),
    read=lambda plan, stage: stage.zero,
    findings=_findings,
    place=1,
    mesh=_mesh,
    kind=lambda stage: f"zero{stage.zero}" if splits(stage.zero) else "",
    machinery=Machinery(1, lambda plan: max(stage.zero for stage in plan.stages), "zero"),
    show=_show,
)
