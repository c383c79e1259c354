"""Linear layers of a model, whoever wrote them: where they are, and their weight as [out, in]."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest

Patterns = str | Sequence[str]
"""Module paths, or patterns of them as in file names."""


class Place(NamedTuple):
    """A module, and where it is."""

    path: str
    parent: nn.Module
    name: str
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        """Another module takes the place."""
        self.parent.register_module(self.name, module)


def is_turned(module: nn.Module) -> bool:
    """Tells whether a layer keeps its weight as [in, out], as GPT-2's of transformers does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Tells whether a module is a plain linear layer, and no subclass that may do more."""
    return type(module) is nn.Linear or is_turned(module)


def weight_of(module: nn.Module) -> Tensor:
    """Returns the weight [out, in] of a plain linear layer, as a view."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if is_turned(module) else weight


def bias_of(module: nn.Module) -> nn.Parameter | None:
    """Returns the bias [out] of a plain linear layer, if it has one."""
    found = module.bias
    assert found is None or isinstance(found, nn.Parameter)
    return found


def places(model: nn.Module, kind: tuple[type[nn.Module], ...] = ()) -> Iterator[Place]:
    """Yields plain linear layers, and modules of some types, in order of the model."""
    for path, module in list(model.named_modules()):
        if path and (is_linear(module) or (kind and isinstance(module, kind))):
            parent, _, name = path.rpartition(".")
            yield Place(path, model.get_submodule(parent), name, module)


def chosen(found: Sequence[Place], only: Patterns, skip: Patterns, what: str) -> tuple[Place, ...]:
    """Returns places that one of the patterns `only` names and none of `skip`, as whole paths or as
    their last parts. PlanError if a pattern names none, or nothing is left."""
    wanted, unwanted = _texts(only), _texts(skip)
    if not found:
        raise PlanError(f"the model has no linear layers that {what}")
    for pattern in (*wanted, *unwanted):
        if not any(matches(place.path, pattern) for place in found):
            near = nearest(pattern, [place.path for place in found])
            raise PlanError(
                f"{pattern!r} names none of the {len(found)} linear layers that {what}; nearest "
                f"is {near!r}"
            )
    kept = [
        place for place in found
        if any(matches(place.path, p) for p in wanted)
        and not any(matches(place.path, p) for p in unwanted)
    ]  # fmt: skip
    if not kept:
        raise PlanError(
            f"`only` and `skip` leave none of the {len(found)} linear layers that {what}"
        )
    return tuple(kept)


def matches(path: str, pattern: str) -> bool:
    """Tells whether a pattern names a module path, or its last parts."""
    return fnmatchcase(path, pattern) or path.endswith(f".{pattern}")


def shared_weights(model: nn.Module) -> frozenset[int]:
    """Returns the ids of parameters that several modules have."""
    modules = model.named_modules(remove_duplicate=True)
    counts = Counter(id(p) for _, m in modules for p in m._parameters.values() if p is not None)
    return frozenset(key for key, count in counts.items() if count > 1)


def _texts(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)
