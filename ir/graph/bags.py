"""Bags of rows: where each begins is counted by the model, or given with the batch."""

from collections.abc import Iterator

from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.rules import given, input_shapes, name_of, slot

_UNCHANGED = frozenset("unsqueeze squeeze view reshape contiguous to _to_copy clone".split())


def has_given_bags(op: Op, graph: Graph) -> bool:
    """Tells whether the bags of an `embedding_bag` may be of any length: its offsets are not
    counted by the model, in equal steps, as they are of ids [samples, ids of each]."""
    ids, offsets = slot(op, "indices"), slot(op, "offsets")
    assert ids is not None and offsets is not None, op
    shapes = input_shapes(op, graph)
    count = shapes[ids][0]
    if given(op, "include_last_offset") or not shapes[offsets][0]:
        return True
    step, rest = divmod(count, shapes[offsets][0])
    name = op.inputs[offsets]
    return bool(rest) or not counts_from_zero(graph, name, shapes[offsets][0], step)


def bag_problems(graph: Graph, num_microbatches: int) -> Iterator[str]:
    """Yields the look-ups whose bags no micro-batches cut: each sample has one, as long as the
    batch says, and which ids belong to some of the samples nobody knows before it is there."""
    for op in graph.ops if num_microbatches > 1 else ():
        bag = name_of(op) == "embedding_bag"
        if bag and _is_of_samples(op, graph) and has_given_bags(op, graph):
            yield (
                f"{op.key}: its bags lie where offsets say, which {num_microbatches} micro-batches "
                "cannot cut; nearest: num_microbatches 1, or ids [samples, ids of each] without "
                "offsets, filled up with padding_idx"
            )


def _is_of_samples(op: Op, graph: Graph) -> bool:
    kinds = {graph.tensors[name].kind for name in op.inputs[1:]}
    constant = kinds <= {Kind.BUFFER, Kind.CONSTANT}
    return graph.tensors[op.outputs[0]].shape[0] == graph.batch_size and not constant


def counts_from_zero(graph: Graph, name: str, size: int, step: int = 1) -> bool:
    """Whether a value is 0, `step`, 2 * `step`, … along its only dim, so that it splits with what
    it indexes."""
    tensor = graph.tensors[name]
    if tensor.numel != size or max(tensor.shape, default=1) != size:
        return False
    while op := graph.producer.get(name):
        if name_of(op) == "arange":
            return given(op, "start", 0) == 0 and given(op, "step", 1) == step
        shifted = name_of(op) == "add" and given(op, "other") == 0
        if name_of(op) not in _UNCHANGED and not shifted:
            return False
        name = op.inputs[0]
    return False
