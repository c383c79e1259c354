"""How many nodes a job needs, and how many processes each of them runs."""

from dataclasses import dataclass

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What launchers want to know."""

    num_nodes: int
    per_node: int
    """Processes, one for each device."""
    device: str
    """Name of the device type."""
    on_gpu: bool
    missing: tuple[str, ...]


def launch_shape(plan: Plan, cluster: Cluster) -> LaunchShape:
    """Nodes are those that hold ranks of the plan, in order."""
    counts: dict[int, int] = {}
    for rank in range(plan.world_size):
        counts[cluster.node_of(rank)] = counts.get(cluster.node_of(rank), 0) + 1
    names = dict.fromkeys(cluster.device(rank).name for rank in range(plan.world_size))
    missing = []
    if len(set(counts.values())) > 1:
        sizes = ", ".join(map(str, counts.values()))
        missing.append(
            f"nodes of different size ({sizes} ranks): torchrun starts as many on each; "
            f"{max(counts.values())} are given"
        )
    if len(names) > 1:
        missing.append(f"several device types ({', '.join(names)}): the first is given")
    device = cluster.device(0)
    return LaunchShape(
        len(counts), max(counts.values()), device.name, device.kind == "cuda", tuple(missing)
    )
