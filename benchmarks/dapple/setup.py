"""DAPPLE's machines, models and plans as published (arXiv:2007.01045), as data of ours.

Link constants: `analysis_dapple.py` of the authors' repository (AlibabaPAI/DAPPLE). Their time for
a message between stages is bytes / rate per pair of devices, and for an all-reduce among n devices
2 (n-1) / n * bytes / rate, whatever the number of devices of a node that take part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import Curve, Link
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.layer_profile import LayerProfile, read_layer_profile
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.space import microbatch_counts

GB = 1e9
DEVICE = "v100-16"
NVLINK_ALL_REDUCE = {8: 130 * GB, 4: 80 * GB, 2: 40 * GB}
"""Devices in the group -> bytes per second."""
NVLINK_SEND = 40 * GB
ETHERNET = {"A": (3.0 * GB, 0.8 * GB), "B": (3.0 * GB, 0.8 * GB), "C": (1.2 * GB, 0.32 * GB)}
"""Config -> all-reduce (NCCL) and send (gRPC) rates between nodes: 25, 25 and 10 Gb/s."""
SCHEDULES = ("dapple_pa", "dapple_pb")


@dataclass(frozen=True, slots=True)
class Published:
    """A plan of the paper: replicas per stage, and the layers that begin stages 1, 2, ..."""

    replicas: tuple[int, ...]
    begins: tuple[str, ...] = ()
    """Descriptions of layers; none and several stages: straight, cut for equal times."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model with a profile."""

    name: str
    profile: str
    batch: int


def _all_reduce(size: int, rate: float) -> Curve:
    seconds = 2 * (size - 1) / size * GB / rate
    return Curve(operation="all_reduce", size=size, points=((0.0, 0.0), (GB, seconds)))


def _send(rate: float) -> Curve:
    return Curve(operation="send", size=2, points=((0.0, 0.0), (GB, GB / rate)))


def cluster(config: str, nodes: int, devices_per_node: int) -> Cluster:
    """Nodes of V100-16GB with the authors' link constants; their reference is the module's."""
    all_reduce, send = ETHERNET[config]
    inside = Link(
        name="nvlink", bandwidth_bytes_per_s=NVLINK_ALL_REDUCE[8], latency_s=0.0,
        curves=(*(_all_reduce(n, rate) for n, rate in NVLINK_ALL_REDUCE.items()),
                _send(NVLINK_SEND)),
        source="fitted", reference="analysis_dapple.py of AlibabaPAI/DAPPLE",
    )  # fmt: skip
    between = Link(
        name="ethernet", bandwidth_bytes_per_s=all_reduce / devices_per_node, latency_s=0.0,
        curves=(_send(send),),
        source="fitted", reference="analysis_dapple.py of AlibabaPAI/DAPPLE",
    )  # fmt: skip
    return Cluster(
        name=f"{config}:{nodes}x{devices_per_node}",
        device_types=(presets.device(DEVICE),),
        nodes=(Node(devices=(DEVICE,) * devices_per_node, link=inside),) * nodes,
        between_nodes=between,
    )


CONFIGS = {"A": (2, 8), "B": (16, 1), "C": (16, 1)}


@cache
def config(name: str) -> Cluster:
    """Config A, B or C with 16 devices."""
    return cluster(name, *CONFIGS[name])


_DROPPED = {name: ("Embed-Token", "dropout") for name in ("xlnet-24-pbs-1", "xlnet-36-pbs-1")}
"""Profile -> an edge that the model has not. What all layers of XLNet read, 4 MB, are its position
encodings (arXiv:1906.08237, 2.2), which no parameter makes; DAPPLE's own ratio of communication to
computation, 0.67 in config C, counts the 2 MB of activations alone."""


def corrected(profile: LayerProfile) -> LayerProfile:
    """Without the edges that the profiled model has not."""
    if profile.name not in _DROPPED:
        return profile
    at = [layer.description for layer in profile.layers]
    edge = tuple(map(at.index, _DROPPED[profile.name]))
    return replace(profile, edges=tuple(e for e in profile.edges if e != edge))


def read(folder: Path, name: str) -> LayerProfile:
    """A profile of the folder; says so if the folder is another one."""
    path = folder / f"{name}.txt"
    if not path.exists():
        raise PlanError(
            f"{folder} has no {name}.txt; it must be the folder of DAPPLE's profiles "
            "(profiling_results of github.com/AlibabaPAI/DAPPLE)"
        )
    return corrected(read_layer_profile(path))


def cuts_of(
    profile: LayerProfile, plan: Published, send_rate: float = NVLINK_SEND
) -> tuple[int, ...]:
    """Positions of the layers that begin stages 1, 2, ..."""
    if not plan.begins:
        return even(profile, len(plan.replicas), send_rate)
    return tuple(_position(profile, begin) for begin in plan.begins)


def _position(profile: LayerProfile, begin: str) -> int:
    """Of the layer so described; `x#2` is the second one."""
    description, _, number = begin.partition("#")
    found = [i for i, x in enumerate(profile.layers) if x.description == description]
    return found[int(number or 1) - 1]


def even(profile: LayerProfile, stages: int, send_rate: float) -> tuple[int, ...]:
    """The cuts that make the slowest stage fastest, by dynamic programming. As in DAPPLE, what is
    between two stages counts as a stage: activations one way, gradients the other."""
    ends = (0.0, *accumulate(x.forward_s + x.backward_s for x in profile.layers))
    count = len(profile.layers)
    links = [2 * profile.cut_bytes(i) / send_rate for i in range(count)]
    found: dict[tuple[int, int], tuple[float, tuple[int, ...]]]
    found = {(1, stop): (ends[stop], ()) for stop in range(1, count + 1)}
    for k in range(2, stages + 1):
        for stop in range(k, count + 1):
            found[k, stop] = min(
                (max(found[k - 1, cut][0], links[cut], ends[stop] - ends[cut]),
                 (*found[k - 1, cut][1], cut))
                for cut in range(k - 1, stop)
            )  # fmt: skip
    return found[stages, count][1]


def problem(graph: Graph, machines: Cluster, constraints: Sequence[str] = ()) -> Problem:
    return make_problem(
        graph, machines, optimizer="adamw", precision="fp32", constraints=tuple(constraints)
    )


def fastest(
    given: Problem, replicas: Sequence[int], cuts: Sequence[int], schedules: Sequence[str]
) -> Plan:
    """The plan with these stages whose number of micro-batches and schedule are the best.

    The paper names neither. Every replica gets at least one sample of each micro-batch. Plans that
    fit come first.
    """
    plans = []
    for count in microbatch_counts(given):
        if given.batch // count < max(replicas):
            continue
        for schedule in schedules if len(replicas) > 1 else schedules[:1]:
            choice = uniform_choice(
                given, pp=len(replicas), stage_dp=replicas, cuts=cuts, schedule=schedule,
                num_microbatches=count,
            )  # fmt: skip
            plans.append(build_plan(given, choice))
    return min(plans, key=lambda plan: (excess_bytes(given, plan), step_s(plan)))


def step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def graph_of(profile: LayerProfile, batch: int) -> Graph:
    return profiled_graph(profile, batch)


def speedup(profile: LayerProfile, plan: Plan) -> float:
    """Over one device that runs the whole global batch sequentially at the profile's times."""
    return plan.global_batch_size * profile.sample_s / step_s(plan)
