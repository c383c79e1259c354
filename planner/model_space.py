"""Model meshes that are tried: tensor parallelism in one to three axes, context, experts."""

from collections.abc import Iterator
from math import prod

from meshwright.ir.graph import Graph, Kind
from meshwright.ir.plan import ModelMesh, model_mesh
from meshwright.planner.constraints import asked_meshes, model_allowed
from meshwright.planner.problem import Problem

LAID_OUT: frozenset[str] = frozenset()
"""Model axes besides `tp` that there are layouts for."""
NODES = 2
"""Model axes in several factors may reach over so many nodes."""


def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def widest_node(problem: Problem) -> int:
    return max(len(node.devices) for node in problem.cluster.nodes)


def tensor_sizes(problem: Problem) -> tuple[int, ...]:
    """Sizes of one tensor axis: within a node, and even parts of it where nodes are large."""
    widest = widest_node(problem)
    return tuple(range(1, widest + 1)) if widest <= 4 else divisors(widest)


def model_meshes(problem: Problem) -> tuple[ModelMesh, ...]:
    """Model meshes that are tried: pins kept, and only those that there are layouts for."""
    found = dict.fromkeys([*_forms(problem), *asked_meshes(problem.constraints)])
    return tuple(
        mesh
        for mesh in found
        if prod(n for _, n in mesh) <= problem.cluster.num_devices
        and model_allowed(problem.constraints, mesh)
        and problem.variants(mesh)
    )


def _forms(problem: Problem) -> Iterator[ModelMesh]:
    sizes = tensor_sizes(problem)
    yield from (model_mesh({"tp": tp}) for tp in sizes)
    most = min(NODES * widest_node(problem), problem.cluster.num_devices)
    if "cp" in LAID_OUT and has_attention(problem.graph):
        yield from _beside_tensor("cp", _powers(most), sizes, most)
    if "ep" in LAID_OUT:
        experts = num_experts(problem.graph)
        yield from _beside_tensor("ep", _powers(min(most, experts)), sizes, most)
    if "tp_row" in LAID_OUT:
        yield from _factored(most)


def has_attention(graph: Graph) -> bool:
    return any("scaled_dot_product" in op.target for op in graph.ops)


def num_experts(graph: Graph) -> int:
    """Of the widest layer of experts; 0 if there is none."""
    stacks = (
        graph.tensors[name]
        for op in graph.ops
        if op.target.startswith("meshwright.experts")
        for name in op.inputs
    )
    return max((t.shape[0] for t in stacks if t.kind is Kind.PARAMETER), default=0)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(1, most.bit_length()) if 2**n <= most)


def _beside_tensor(
    axis: str, sizes: tuple[int, ...], tensor: tuple[int, ...], most: int
) -> Iterator[ModelMesh]:
    for size in sizes:
        for tp in tensor:
            if size * tp <= most:
                yield model_mesh({axis: size, "tp": tp})


def _factored(most: int) -> Iterator[ModelMesh]:
    """Two and three tensor axes of equal or nearly equal sizes."""
    near = [(q, r) for q in range(2, most) for r in (q, 2 * q) if q * r <= most]
    for small, large in near:
        yield from (
            model_mesh({"tp_row": row, "tp_col": col})
            for row, col in dict.fromkeys([(small, large), (large, small)])
        )
        for depth in range(2, large + 1):
            if depth * small * large <= most and (depth == 2 or small == large):
                yield model_mesh({"tp_depth": depth, "tp_row": small, "tp_col": large})
