"""What storing a parameter costs, placement by placement."""

from collections.abc import Sequence

from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.layout.conversions import Conversion
from meshwright.ir.layout.layout import RP, Placement, R, Replicate, Shard
from meshwright.planner.inside.axis_layout import PICOSECONDS, shard_share
from meshwright.planner.inside.prices import Prices


def stored_choices(
    graph: Graph, name: str, shards: Sequence[Shard], ranks: int, prices: Prices
) -> tuple[tuple[Placement, int], ...]:
    """Placements a parameter may be stored in, with what storing it (and summing its gradient once
    per step) costs."""
    tensor = graph.tensors[name]
    if tensor.kind is not Kind.PARAMETER:
        return ((R, 0),)
    places: list[Placement] = [R, *([RP] if tensor.requires_grad else []), *shards]
    return tuple((p, _stored_cost(graph, name, p, ranks, prices)) for p in places)


def _stored_cost(graph: Graph, name: str, placement: Placement, ranks: int, prices: Prices) -> int:
    nbytes = graph.tensors[name].nbytes
    seconds = prices.stored_s(round(nbytes * shard_share(graph, name, placement, ranks)))
    if isinstance(placement, Replicate) and placement.partial_grad:
        once = Conversion(R, RP).backward
        seconds += prices.primitive_s(once, nbytes, ranks)
    return round(seconds * PICOSECONDS)
