"""Parameters whose copies lie along more axes than those of replicas: a mixture's dense part is
whole on `ep` and on `cp`, where each rank has other tokens.

There replicas and such axes are one line: gradients are summed over all of it at once, and `zero`
shards over all of it. A stage has as many foldings as it has kinds of parameters; experts that
`ep` splits are folded over `cp` alone, or over nothing if `cp` splits them, too.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

from meshwright.ir.plan.plan import ModelMesh, Stage, model_mesh

FOLDED = ("cp", "ep")
"""Model axes on which parameters lie whole, but for those of experts."""
Fold = tuple[str, ...]
"""Model axes that are one with dp_shard, in the order of the mesh."""


def fold_of(model: ModelMesh, summed: Collection[str]) -> Fold:
    """Returns the axes that are folded for a parameter whose gradient is a sum over those of
    `summed`."""
    return tuple([axis for axis, _ in model if axis in FOLDED and axis in summed])


def folds_of(model: ModelMesh) -> tuple[Fold, ...]:
    """Returns all foldings that a parameter may have on a mesh, the widest last."""
    axes = [axis for axis, _ in model if axis in FOLDED]
    chosen = product(*[(False, True)] * len(axes))
    return tuple([tuple(a for a, has in zip(axes, own, strict=True) if has) for own in chosen])


def may_share(dp_shard: int, model: ModelMesh) -> bool:
    """Tells whether `zero` may split something on a mesh: among ranks of dp_shard, or of axes that
    are folded."""
    return dp_shard > 1 or len(folds_of(model)) > 1


def folded(stage: Stage, fold: Fold) -> Stage:
    """Returns the stage as parameters see it that lie whole on the axes of `fold`: these belong to
    dp_shard. Lines of dp have their ranks in ascending order."""
    if not fold:
        return stage
    mesh, devices = folded_mesh(tuple(stage.mesh.items()), stage.devices, fold)
    times = stage.model_size // prod([size for _, size in model_mesh(dict(mesh))])
    shares = tuple([share for share in stage.batch_shares for _ in range(times)])
    return replace(stage, mesh=dict(mesh), devices=devices, batch_shares=shares)


@lru_cache(maxsize=4096)
def folded_mesh(
    mesh: tuple[tuple[str, int], ...], devices: tuple[int, ...], fold: Fold
) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """Returns a mesh, row-major over its devices, and these where the axes of `fold` belong to
    dp_shard."""
    given = dict(mesh)
    model = model_mesh(given)
    times = prod([given[axis] for axis in fold])
    lines: dict[tuple[int, ...], list[int]] = {}
    for number, rank in enumerate(devices):
        place, at = number, []
        for axis, size in reversed(model):
            place, own = divmod(place, size)
            if axis not in fold:
                at.append(own)
        lines.setdefault(tuple(reversed(at)), []).append(rank)
    ordered = [sorted(lines[at]) for at in sorted(lines)]
    return (
        ("dp_replicate", given.get("dp_replicate", 1)),
        ("dp_shard", given.get("dp_shard", 1) * times),
        *[(axis, size) for axis, size in model if axis not in fold],
    ), tuple([rank for same in zip(*ordered, strict=True) for rank in same])
