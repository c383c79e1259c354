"""Model meshes that are tried: tensor parallelism in one to three axes, context, experts."""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import zip_longest
from math import prod

from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ModelMesh, model_mesh
from meshwright.planner.inside.expert_weights import expert_weights
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.problem import Problem

EXPERT_NODES = 8
"""Nodes over which experts alone are split at most: tokens travel once to each rank, and over more
links than there are experts for a token that saves nothing."""
TENSOR_BESIDE = 4
"""Ranks of tensor parallelism at most beside ranks of experts with samples of their own."""
NODES = 2
"""Model axes may reach over so many nodes: several factors, or, of a cluster of so few, one."""

LEAST_TOKENS = 4096
"""Tokens that a rank has of a sample, at least, where samples are split over more nodes than that:
there a ring has enough to compute beside each message."""


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def widest_node(problem: Problem) -> int:
    return problem.cluster.widest_node


def tensor_sizes(problem: Problem) -> tuple[int, ...]:
    """Sizes of one tensor axis: within a node, and even parts of it where nodes are large."""
    widest = widest_node(problem)
    sizes = tuple(range(1, widest + 1)) if widest <= 4 else divisors(widest)
    return allowed(problem.constraints, "tp", sizes)


def plain_forms(problem: Problem) -> tuple[ModelMesh, ...]:
    """One tensor axis each, of every size that is tried for all stages."""
    return tuple(model_mesh({"tp": tp}) for tp in tensor_sizes(problem))


def wide_forms(problem: Problem) -> tuple[ModelMesh, ...]:
    """One tensor axis over all nodes, where there are few: of small models that have few samples,
    layers may take less than to divide samples. More nodes have enough to divide otherwise."""
    node, devices = widest_node(problem), problem.cluster.num_devices
    sizes = range(2 * node, devices + 1, node) if devices <= NODES * node else ()
    return tuple(model_mesh({"tp": size}) for size in sizes)


def forms(problem: Problem) -> tuple[ModelMesh, ...]:
    """All but wide ones: single tensor axes first, then experts alone, a node's and what is around
    that, then small ones of each kind in turn."""
    graph, sizes = problem.graph, tensor_sizes(problem)
    most = min(NODES * widest_node(problem), problem.cluster.num_devices)
    alone = tuple(model_mesh({"ep": size}) for size in expert_sizes(problem))
    context = _powers(most) if has_attention(graph) else ()
    experts = _powers(min(most, num_experts(graph)))
    wide = tuple(tp for tp in sizes if tp > 1)
    kinds: list[Iterable[ModelMesh]] = [
        _beside_tensor("ep", experts, (1,), most),
        _beside_tensor("cp", context, (1,), most),
        _in_two(most),
        _beside_tensor("ep", experts, wide, most),
        _beside_tensor("cp", context, wide, most),
        _over_nodes(problem, sizes, most),
        _in_three(most),
    ]
    in_turn = zip_longest(*(sorted(kind, key=_ranks) for kind in kinds))
    others = [mesh for turn in in_turn for mesh in turn if mesh is not None]
    return (*plain_forms(problem), *dict.fromkeys([*alone, *others]))


def expert_sizes(problem: Problem) -> tuple[int, ...]:
    """Ranks among which experts alone are split that are tried first, those of a node before: whole
    experts on each, over `EXPERT_NODES` nodes at most."""
    count, node = num_experts(problem.graph), widest_node(problem)
    most = min(EXPERT_NODES * node, problem.cluster.num_devices, count)
    found = [size for size in _powers(most) if count % size == 0 and 2 * size >= node]
    return tuple(sorted(found, key=lambda size: (size != node, size)))


def expert_forms(problem: Problem) -> tuple[ModelMesh, ...]:
    """Meshes for ranks of experts with samples of their own: a node or more of them, up to
    `EXPERT_NODES`, of which some ranks of a node may share tensors."""
    count, node = num_experts(problem.graph), widest_node(problem)
    most = min(EXPERT_NODES * node, problem.cluster.num_devices) if count else 0
    tensor = [tp for tp in tensor_sizes(problem) if tp <= TENSOR_BESIDE]
    return tuple(
        model_mesh({"ep": ranks // tp, "tp": tp})
        for ranks in _powers(most)
        for tp in tensor
        if ranks % tp == 0 and ranks // tp > 1 and count % (ranks // tp) == 0
        if ranks >= min(node, count)
    )


def _ranks(mesh: ModelMesh) -> int:
    return prod(size for _, size in mesh)


def _over_nodes(problem: Problem, tensor: tuple[int, ...], most: int) -> Iterator[ModelMesh]:
    """Longer samples over more ranks: sequences alone, and around the widest tensor axis."""
    devices = problem.cluster.num_devices
    for size in _powers(min(longest_sample(problem.graph) // LEAST_TOKENS, devices)):
        for tp in dict.fromkeys((1, max(tensor, default=1))):
            if most < size * tp <= devices:
                yield model_mesh({"cp": size, "tp": tp})


def longest_sample(graph: Graph) -> int:
    """Queries of the longest attention; 0 if there is none."""
    found = (op.inputs[0] for op in graph.ops if classify(op.target) is OpClass.ATTENTION)
    return max((graph.tensors[name].shape[-2] for name in found), default=0)


def has_attention(graph: Graph) -> bool:
    return longest_sample(graph) > 0


def num_experts(graph: Graph) -> int:
    """Of the widest layer of experts; 0 if there is none."""
    return max(expert_weights(graph).values(), default=0)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(1, most.bit_length()) if 2**n <= most)


def _beside_tensor(
    axis: str, sizes: tuple[int, ...], tensor: tuple[int, ...], most: int
) -> Iterator[ModelMesh]:
    for size in sizes:
        for tp in tensor:
            if size * tp <= most:
                yield model_mesh({axis: size, "tp": tp})


def _in_two(most: int) -> Iterator[ModelMesh]:
    """Two tensor axes of equal or nearly equal sizes."""
    for row in range(2, most):
        for col in (row, 2 * row):
            if row * col <= most:
                yield model_mesh({"tp_row": row, "tp_col": col})


def _in_three(most: int) -> Iterator[ModelMesh]:
    """Three of them, two of which are equal."""
    for size in range(2, most):
        for depth in range(2, size + 1):
            if depth * size * size <= most:
                yield model_mesh({"tp_depth": depth, "tp_row": size, "tp_col": size})
