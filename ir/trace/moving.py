"""State that a model keeps in Python: numbers, texts and growing containers that forward changes.

They are looked for in the attributes of its modules, in globals and closures of its code, also
inside containers and plain objects.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Self

from torch import Tensor, nn

from meshwright.ir.text.digest import digest
from meshwright.ir.trace.chance import standing

Number = int | float
Plain = int | float | complex | bool | str | bytes | None
DEEPEST, LONGEST = 5, 1000
_SKIPPED = frozenset(
    "_parameters _buffers _modules _backward_hooks _backward_pre_hooks _state_dict_hooks "
    "_forward_hooks _forward_pre_hooks _non_persistent_buffers_set _is_full_backward_hook".split()
)


_FOREIGN = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy"}
"""Packages whose objects and functions keep nothing for a model."""


_CACHED: Any = type(lru_cache(lambda: None))
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where something is kept: `calls` of a module, `state["n"]`, global `COUNT`."""

    name: str
    holder: Any
    key: Any
    """Of an attribute, an item of a dict or list, or None for the cell of a closure."""
    how: str
    """attribute, item, cell."""

    def get(self) -> Any:
        """What is there now."""
        if self.how == "attribute":
            return vars(self.holder).get(self.key)
        if self.how == "cell":
            return self.holder.cell_contents
        try:
            return _item(self.holder, self.key)
        except (LookupError, TypeError):
            return None

    def put(self, value: Any) -> None:
        """Put another value there."""
        if self.how == "attribute":
            vars(self.holder)[self.key] = value
        elif self.how == "cell":
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


def _item(holder: Any, key: Any) -> Any:
    """What a container itself has there: some make things of it when they are asked, as tables of
    layers make a layer."""
    if isinstance(holder, dict) and type(holder) is not dict:
        kept = dict.get(holder, key, _ABSENT)
        return holder[key] if kept is _ABSENT else kept
    return holder[key]


@dataclass(frozen=True, slots=True)
class HeldState:
    """What a place held: a plain value, a tensor, or the number of items of a container."""

    place: StatePlace
    value: Any


@dataclass(frozen=True, slots=True)
class _Items:
    """What a container has, read and written as Python's own kind of it does: one of a library may
    make other keys of those it is given, as transformers' registry of outputs does."""

    container: Any
    kind: Any
    items: Any

    @classmethod
    def of(cls, container: Any) -> Self:
        own = ("builtins", "collections")
        kind: Any = next(x for x in type(container).__mro__ if x.__module__ in own)
        items = dict(kind.items(container)) if issubclass(kind, dict) else kind.__iter__(container)
        return cls(container, kind, items if isinstance(items, dict) else [*items])

    def put_back(self) -> None:
        """Gives the container its items again, if it has others in number."""
        if self.kind.__len__(self.container) != len(self.items):
            self.kind.clear(self.container)
            add = self.kind.extend if hasattr(self.kind, "extend") else self.kind.update
            add(self.container, self.items)


def kept_state(model: nn.Module, functions: tuple[Any, ...] = ()) -> dict[str, HeldState]:
    """Everything plain that the model and `functions` keep, by name."""
    found: dict[str, HeldState] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        made = sum(buffer is not None for buffer in module._buffers.values())
        found[f"{path} buffers"] = HeldState(
            StatePlace(path, module, "_buffers", "attribute"), f"{made} of them"
        )
        for key in vars(module):
            if key not in _SKIPPED:
                name = f"{path}.{key}" if path else key
                _look(StatePlace(name, module, key, "attribute"), found, seen, 0)
    for function in _functions(model, functions):
        for place in _around(function):
            _look(place, found, seen, 0)
    return found


@contextmanager
def put_back(model: nn.Module, functions: tuple[Any, ...]) -> Iterator[None]:
    """Afterwards globals, closures and caches of the model's code hold no fake tensors: they are
    what they were, caches of `functools` empty if something was added."""
    found: dict[str, HeldState] = {}
    cached: dict[int, Any] = {}
    for function in _functions(model, functions):
        # A cache may be around the function, or inside one that is: of what it closes over.
        known: list[Any] = [*map(function.__globals__.get, _names(function.__code__))]
        known += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        cached |= {id(x): (x, x.cache_info().misses) for x in known if hasattr(x, "cache_info")}
        for place in _around(function):
            _look(place, found, set(), 0)
    plain = [kept for kept in found.values() if isinstance(kept.place.get(), Plain | Tensor)]
    values = [kept.place.get() for kept in found.values()]
    containers = [_Items.of(x) for x in values if isinstance(x, list | dict | set | deque)]
    try:
        yield
    finally:
        for items in containers:
            items.put_back()
        for cache, misses in cached.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for kept in plain:
            if not _same(kept.value, kept.place.get()):
                kept.place.put(kept.value)


def _look(place: StatePlace, found: dict[str, HeldState], seen: set[int], depth: int) -> None:
    value = place.get()
    if isinstance(value, Plain | Tensor):
        found[place.name] = HeldState(place, value)
        return
    if (stands := standing(value)) is not None:
        found[place.name] = HeldState(place, digest([stands])[:8])
        return
    if isinstance(value, nn.Module | type | FunctionType) or depth > DEEPEST or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | deque | dict | set):
        found[place.name] = HeldState(place, len(value))
    for inner in _inside(place.name, value):
        _look(inner, found, seen, depth + 1)


def _inside(name: str, value: Any) -> Iterator[StatePlace]:
    if isinstance(value, dict):
        for key in list(value)[:LONGEST]:
            yield StatePlace(f"{name}[{key!r}]", value, key, "item")
    elif isinstance(value, list | deque | tuple):
        for index in range(min(len(value), LONGEST)):
            yield StatePlace(f"{name}[{index}]", value, index, "item")
    elif type(value).__module__.split(".")[0] not in _FOREIGN and hasattr(value, "__dict__"):
        for key in list(vars(value))[:LONGEST]:
            yield StatePlace(f"{name}.{key}", value, key, "attribute")


def _functions(model: nn.Module, more: tuple[Any, ...]) -> Iterator[FunctionType]:
    """Functions of the model's own classes, its hooks and `more`."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    methods = (
        method
        for kind in kinds
        if kind.__module__.split(".")[0] not in _FOREIGN
        for method in vars(kind).values()
    )
    hooks = (
        hook for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )  # fmt: skip
    held = (value for module in model.modules() for value in vars(module).values())
    waiting = [*methods, *hooks, *more, *held, *(type(x).__call__ for x in more)]
    seen: set[int] = set()
    while waiting:
        function = _bare(waiting.pop())
        if function is None or (function.__module__ or "").startswith("meshwright.ir."):
            continue
        if id(function) not in seen:
            seen.add(id(function))
            yield function
            waiting += [
                value for name in _names(function.__code__)
                if getattr(value := function.__globals__.get(name), "__module__", None)
                == function.__module__
            ]  # fmt: skip
            waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]


def _names(code: CodeType) -> Iterator[str]:
    """What the code and functions inside it read by name."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _bare(given: Any) -> FunctionType | None:
    while True:
        if isinstance(given, partial):
            given = given.func
        elif isinstance(given, MethodType | staticmethod | classmethod):
            given = given.__func__
        elif isinstance(given, property):
            given = given.fget
        elif isinstance(given, _CACHED):
            given = given.__wrapped__
        else:
            return given if isinstance(given, FunctionType) else None


def _around(function: FunctionType) -> Iterator[StatePlace]:
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if name in function.__globals__ and not callable(value) and not _is_module(value):
            yield StatePlace(f"global {name}", function.__globals__, name, "item")
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        if name != "__class__" and _is_set(cell) and not callable(cell.cell_contents):
            yield StatePlace(f"{name} around {function.__qualname__}", cell, None, "cell")


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_module(value: Any) -> bool:
    return type(value).__name__ == "module"


def moved(
    before: dict[str, HeldState], after: dict[str, HeldState]
) -> dict[str, tuple[Any, HeldState]]:
    """What differs: the value before, and what is there after."""
    return {
        name: (before[name].value if name in before else None, kept)
        for name, kept in after.items()
        if name not in before or not _same(before[name].value, kept.value)
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b
    return type(a) is type(b) and (a == b or (a != a and b != b))


Asked = Callable[[bool], bool]
"""Is told the outcome of a comparison; gives the one to use."""


class _Watched:
    """A number that tells who compares it, and so does what is computed from it."""

    asked: Asked


def watched(value: Number, asked: Asked) -> Number:
    """A number equal to `value` whose comparisons go through `asked`."""
    kind: Any = _Int if isinstance(value, int) else _Float
    made: Any = kind(value)
    made.asked = asked
    return made  # type: ignore[no-any-return]


class _Int(int, _Watched):
    pass


class _Float(float, _Watched):
    pass


def _again(self: Any, result: Any) -> Any:
    if type(result) in (int, float):
        return watched(result, self.asked)
    return tuple(_again(self, x) for x in result) if isinstance(result, tuple) else result


def _computing(base: type, name: str) -> Any:
    original = getattr(base, name)
    return lambda self, *args: _again(self, original(self, *args))


def _comparing(base: type, name: str) -> Any:
    original = getattr(base, name)

    def compare(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        return self.asked(result) if isinstance(result, bool) else result

    return compare


_COMPUTED = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod "
    "rdivmod neg pos abs round and rand or ror xor rxor lshift rlshift rshift rrshift"
).split()
_KINDS: tuple[tuple[Any, type], ...] = ((_Int, int), (_Float, float))
for _kind, _base in _KINDS:
    for _name in _COMPUTED:
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _computing(_base, f"__{_name}__"))
    for _name in "lt le gt ge eq ne bool".split():
        setattr(_kind, f"__{_name}__", _comparing(_base, f"__{_name}__"))
    _kind.__hash__ = _base.__hash__
