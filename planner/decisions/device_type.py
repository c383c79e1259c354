"""Device types that stages may be on; checked against a cluster it is an `OnType`."""

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import OnType, Pin


def _resolve(item: Pin, cluster: Cluster | None) -> OnType:
    if cluster is None:
        raise PlanError(f"constraint '{item}' needs a cluster to be checked against")
    known = sorted(device.name for device in cluster.device_types)
    wanted = item.value if isinstance(item.value, tuple) else (item.value,)
    for name in wanted:
        if name not in known:
            raise PlanError(
                f"constraint '{item}': {cluster.name} has no {name!r}; nearest is "
                f"{nearest(str(name), known)!r}"
            )
    names = [name for node in cluster.nodes for name in node.devices]
    return OnType(item, tuple(rank for rank, name in enumerate(names) if name in wanted))


DECISION = Decision(words=(), resolve=_resolve)
