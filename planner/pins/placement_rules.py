"""What constraints say of where parameters lie, resolved to the parameters of a model.

Blocks of one pattern share one layout, so what is asked of a parameter of one of them holds for the
corresponding parameters of all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.layout.layout import Placement, Replicate, Shard
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.pins.decisions import Constraint, Placed

Place = tuple[Placement, ...]
"""A placement per axis of a mesh."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Per parameter, by tensor name, what is asked of it."""

    of: Mapping[str, tuple[Placed, ...]] = field(default_factory=dict)

    def places(self, name: str, mesh: ModelMesh, given: Iterable[Place]) -> tuple[Place, ...]:
        """Those of `given` (a placement per axis of the mesh) in which the parameter may lie.

        All of them where none is left: the mesh cannot do what is asked, and plans on it are
        refused as such.
        """
        places, axes = tuple(given), [axis for axis, _ in mesh]
        rules = self.of.get(name, ())
        kept = (
            p
            for p in places
            if all(_keeps(rule, dict(zip(axes, p, strict=True))) for rule in rules)
        )
        return tuple(kept) or places


NO_RULES = PlacementRules()


def placement_rules(constraints: Iterable[Constraint], graph: Graph) -> PlacementRules:
    """The rules of all parameters that constraints name, and of those that follow them."""
    asked = [item for item in constraints if isinstance(item, Placed)]
    if not asked:
        return PlacementRules()
    found: dict[str, dict[Placed, None]] = {}
    for name, tensor in parameter_names(graph).items():
        for item in asked:
            if item.names(name):
                found.setdefault(tensor, {})[item] = None
    groups = _alike(graph)
    changed = True
    while changed:
        changed = False
        for group in groups:
            together = {item: None for name in group for item in found.get(name, {})}
            for name in group:
                if together.keys() - found.get(name, {}).keys():
                    found[name] = dict(together)
                    changed = True
    for name, items in found.items():
        _agree(name, tuple(items))
    return PlacementRules({name: tuple(items) for name, items in found.items()})


def parameter_names(graph: Graph) -> dict[str, str]:
    """Module path -> tensor name, of all parameters under all their names."""
    tied = {group[0]: group for group in graph.tied}
    return {
        path: tensor.name
        for tensor in graph.parameters
        for path in tied.get(tensor.fqn, (tensor.fqn,))
    }


def check_placed(item: Placed, graph: Graph) -> None:
    """PlanError if a parameter that is named lacks the dim that shall be split."""
    if item.placement in ("R", "S"):
        return
    dim = _dim(item.placement)
    for path, name in parameter_names(graph).items():
        dims = len(graph.tensors[name].shape)
        if item.names(path) and dim >= dims:
            nearest = f"S({dims - 1})" if dims else "R"
            raise PlanError(
                f"constraint '{item}': {path} has {dims} dims; nearest is {item.axis}={nearest}, "
                "or a pattern that leaves it out"
            )


def lies(placement: Placement, asked: str) -> bool:
    """Whether a placement is what a rule asks for."""
    if asked == "R":
        return isinstance(placement, Replicate)
    if not isinstance(placement, Shard):
        return False
    return asked in ("S", f"S({placement.dim})", str(placement))


def _keeps(rule: Placed, place: Mapping[str, Placement]) -> bool:
    """Whether a parameter with this placement per axis is where a rule wants it."""
    if rule.axis != "model":
        return rule.axis not in place or lies(place[rule.axis], rule.placement)
    found = [lies(placement, rule.placement) for placement in place.values()]
    return all(found) if rule.placement == "R" else any(found)


def _dim(placement: str) -> int:
    return int(placement[2:].split(",")[0].rstrip(")"))


def _alike(graph: Graph) -> list[tuple[str, ...]]:
    """Parameters at one place of the blocks of one pattern."""
    places: dict[tuple[str, int], dict[str, None]] = {}
    for block in graph.blocks:
        for place, name in enumerate(block.params):
            if graph.tensors[name].kind is Kind.PARAMETER:
                places.setdefault((block.pattern, place), {})[name] = None
    return [tuple(group) for group in places.values() if len(group) > 1]


def _agree(name: str, items: Sequence[Placed]) -> None:
    """PlanError if no placement could keep all of them."""
    for one, other in combinations(items, 2):
        if _clash(one, other):
            raise PlanError(
                f"constraints '{one}' and '{other}' both hold for {name}: equal blocks share one "
                "layout, so they must agree; drop one of them"
            )


def _clash(one: Placed, other: Placed) -> bool:
    whole = [item for item in (one, other) if item.placement == "R"]
    if len(whole) == 1:
        split = other if one is whole[0] else one
        return whole[0].axis in ("model", split.axis)
    same = one.axis == other.axis != "model" and not whole
    return same and not _compatible(one.placement, other.placement)


def _compatible(one: str, other: str) -> bool:
    """Whether a placement can be what both texts ask for; `S(1)` leaves the sections open."""
    if "S" in (one, other) or one == other:
        return True
    return _dim(one) == _dim(other) and f"S({_dim(one)})" in (one, other)
