"""What an optimizer of the user's costs, found by trying it: state, passes over memory, kernels.

A search prices plans by it, and plans tell it (`forms.updates.told_text`), as nothing else can say
it: a plan names no class that is not a file of ours.
"""

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.trying import FAILURES, CannotTry, Group, Make, blocks, reach, uncompiled
from meshwright.forms.updates import UPDATES, Reach, fuse, is_fused, told_text, update
from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import DispatchMode, leaves, storage_key, unwrapped

Given = (
    str
    | torch.optim.Optimizer
    | Callable[..., torch.optim.Optimizer]
    | Sequence[torch.optim.Optimizer]
)
"""How a user says what steps parameters: by name, as an optimizer or several, or as what makes one
of parameters."""
Shapes = Mapping[str, tuple[int, ...]]
"""Of trained parameters, by path."""
_MOST = 2**20
"""Elements of the largest parameter that is tried; larger ones have less rows in the trial."""
_TIMED = 2**16
"""Elements of the parameter whose step is looked at op by op."""


def named_update(given: Given, shapes: Shapes, dtype: torch.dtype) -> str:
    """Returns the key of a user's optimizer among the files of `forms/updates`, or what a plan
    tells of it if it has none. PlanError if it cannot be tried. `dtype`: of what it steps."""
    if isinstance(given, str):
        update(given)  # refuses one that is not known
        return given
    found = [_tried(kind, settings, make, own, dtype)
             for kind, settings, make, own in _members(given, shapes)]  # fmt: skip
    if not found:
        raise PlanError("the optimizer of the search has no parameter of a shape to step")
    return _key_of(found) or _text(found)


@dataclass(frozen=True)
class _Tried:
    """What one group of parameters, stepped alike, has shown."""

    kind: type
    reach: Reach
    block: int
    least: int
    values: int
    """Of its parameters."""
    state: float
    """Values of state, in their dtype."""
    passes: float
    launches: int
    made: float
    fused: bool
    """Whether one kernel steps it, if its class has one."""


def _members(
    given: torch.optim.Optimizer
    | Callable[..., torch.optim.Optimizer]
    | Sequence[torch.optim.Optimizer],
    shapes: Shapes,
) -> Iterable[tuple[type, Group, Make, Sequence[tuple[int, ...]]]]:
    """Class, settings, what makes the like, and shapes of each group."""
    if isinstance(given, Sequence):
        for one in given:
            yield from _members(one, shapes)
    elif isinstance(given, torch.optim.Optimizer):
        for group in given.param_groups:
            kind = type(given)
            own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            trained = [tuple(p.shape) for p in group["params"] if p.requires_grad]
            if trained:
                yield kind, given.defaults | own, group_maker(given, own), trained
    elif shapes:
        made = given([{"params": [nn.Parameter(torch.zeros(next(iter(shapes.values()))[-2:]))]}])
        yield type(made), made.defaults, given, list(shapes.values())


def group_maker(optimizer: torch.optim.Optimizer, own: Group) -> Make:
    """Returns what makes an optimizer of the same class with the settings of one group."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    given = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    # It changes nothing in what is computed, and wants a device that a trial has not.
    plain: Group = {"capturable": False}
    calm = own | {k: v for k, v in plain.items() if k in own}
    given |= {k: v for k, v in plain.items() if k in given}

    def make(groups: list[Group]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = kind([{**calm, **group} for group in groups], **given)
        return found

    return make


def _tried(
    kind: type,
    settings: Group,
    make: Make,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> _Tried:
    try:
        looks_at = reach(kind, settings, make)
        cut = blocks(kind, settings, make) if looks_at is Reach.BLOCK else None
        with torch.random.fork_rng(devices=[]), uncompiled():
            state = sum(
                n * prod(shape) * _state_share(make, shape, dtype)
                for shape, n in Counter(shapes).items()
            )
            passes, launches, made, fused = _work(make, max(shapes, key=prod), dtype)
    except (CannotTry, *FAILURES) as error:
        raise PlanError(
            f"optimizer {kind.__name__} could not be tried on tensors of the model's shapes "
            f"({type(error).__name__}: {error}), so nobody knows what it costs: search with the "
            "name of one that is like it, such as optimizer='adamw'"
        ) from error
    return _Tried(
        kind, looks_at, cut.elements if cut else 0, cut.least if cut else 0,
        sum(map(prod, shapes)), state, passes, launches, made, fused,
    )  # fmt: skip


def _state_share(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Bytes of state per byte of a parameter; of one number there is none to speak of."""
    tried = _smaller(shape, _MOST)
    optimizer, param = _stepped(make, tried, dtype, 2)
    tensors = [x for value in leaves(optimizer.state.get(param, {}))
               if isinstance(value, Tensor) for x in unwrapped(value)]  # fmt: skip
    return sum(x.nbytes for x in tensors if x.numel() > 1) / max(1, param.nbytes)


def _smaller(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A shape of at most so many elements, with less of the first dims."""
    found = list(shape)
    for dim in range(len(found)):
        rest = prod(found) // max(1, found[dim])
        found[dim] = min(found[dim], max(1, most // max(1, rest)))
    return tuple(found)


def _stepped(
    make: Make, shape: tuple[int, ...], dtype: torch.dtype, steps: int
) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    draw = torch.Generator().manual_seed(5)
    param = nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
    optimizer = make([{"params": [param]}])
    fuse(optimizer)  # as jobs do
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=draw).to(dtype)
        optimizer.step()
    return optimizer, param


def _work(make: Make, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[float, int, float, bool]:
    """Bytes that a step reads and writes, its kernels, and bytes that it makes and lets go, both
    per byte of a parameter; and whether it is one kernel's."""
    optimizer, param = _stepped(make, _smaller(shape, _TIMED), dtype, 2)
    param.grad = torch.ones_like(param)
    with _Ops(param.numel() // 4) as seen:
        optimizer.step()
    if not seen.kernels:  # what runs outside torch reads and writes all once
        state = sum(x.nbytes for x in leaves(optimizer.state) if isinstance(x, Tensor))
        return 3 + 2 * state / param.nbytes, 1, 0.0, True
    fused = all(map(is_fused, optimizer.param_groups))
    return seen.moved / param.nbytes, seen.kernels, seen.most / param.nbytes, fused


class _Ops(DispatchMode):  # type: ignore[misc]
    """Counts what ops read, write and make of tensors of some size."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self.moved = self.kernels = self.most = 0
        self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = self._large((args, kwargs))
        keys = {storage_key(x) for x in given}
        results = self._large(made)
        fresh = [x for x in results if storage_key(x) not in keys]
        changes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if not changes and (not fresh or (not given and len(results) == 0)):
            return made  # a view, or of small things alone
        written = fresh or self._large(args[:1])
        self.moved += sum(x.nbytes for x in given) + sum(x.nbytes for x in written)
        self.kernels += bool(given or fresh)
        for x in fresh:
            self._made(x)
        return made

    def _large(self, tree: Any) -> list[Tensor]:
        return [x for x in leaves(tree) if isinstance(x, Tensor) and x.numel() >= self._least]

    def _made(self, x: Tensor) -> None:
        storage, key = x.untyped_storage(), storage_key(x)
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known.add(key)
        self._live += nbytes
        self.most = max(self.most, self._live)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._live -= nbytes


def _key_of(found: Sequence[_Tried]) -> str:
    """The file that has the same class and as much state, and is stepped in the same way, if there
    is one."""
    if not all([one.fused for one in found]):
        return ""
    kinds = {one.kind for one in found}
    state = sum(one.state for one in found) / max(1, sum(one.values for one in found))
    for name in UPDATES:
        form = update(name)
        if kinds == {form.kind} and abs(form.copies - state) < 1e-6:
            return name
    return ""


_ORDER = (Reach.ELEMENT, Reach.BLOCK, Reach.PARAMETER, Reach.GROUP, Reach.CHANCE)
"""From what looks at least."""


def _text(found: Sequence[_Tried]) -> str:
    values = max(1, sum(one.values for one in found))
    names = "And".join(dict.fromkeys(one.kind.__name__ for one in found))
    widest = max(found, key=lambda one: _ORDER.index(one.reach)).reach
    return told_text(
        names, widest,
        state=sum(one.state for one in found) / values,
        passes=sum(one.passes * one.values for one in found) / values,
        launches=max(one.launches for one in found),
        made=max(one.made for one in found),
        block=max(one.block for one in found) if widest is Reach.BLOCK else 0,
        least=max(one.least for one in found) if widest is Reach.BLOCK else 0,
    )  # fmt: skip
