"""`with replicate(): ...`, `with split(): ...`: a model's author says how parts shall be laid out.

Modules and parameters that are made or assigned inside are marked; in a forward, modules called
inside are, while it is traced. Marks are plain data beside the module and change nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from meshwright.ir.errors import PlanError, TraceError
from meshwright.ir.trace.hints import HintKind, Mark

_MARKS = "_meshwright_marks"
"""Attribute of a module: name of a parameter in it, or "" for all of it -> its marks."""
Marks = tuple[Mark, ...]
"""Outermost first."""
Calls = dict[int, Marks]
"""Modules that were called inside annotations, by the identity of their attributes: while a model
is exported, modules go in proxies that share those."""
_around: ContextVar[Marks] = ContextVar("_around", default=())
_tracing: ContextVar[Calls | None] = ContextVar("_tracing", default=None)


@contextmanager
def replicate(size: int | None = None) -> Iterator[None]:
    """Parameters of what is made or called inside are whole on every rank of a replica; with
    `size`, there are so many replicas."""
    with _annotated("replicate", size):
        yield


@contextmanager
def split(size: int | None = None) -> Iterator[None]:
    """Weights of what is made or called inside are split over the ranks of a replica; with `size`,
    over so many."""
    with _annotated("split", size):
        yield


@contextmanager
def stage(index: int) -> Iterator[None]:
    """What is made or called inside runs in pipeline stage `index`, counted from 0."""
    with _annotated("stage", index):
        yield


@contextmanager
def tracing() -> Iterator[Calls]:
    """Inside, annotations note the modules that are called."""
    calls: Calls = {}
    token = _tracing.set(calls)
    try:
        yield calls
    finally:
        _tracing.reset(token)


def marks_of(model: nn.Module, calls: Calls | None = None) -> dict[str, list[Mark]]:
    """Every parameter, by all its paths, with the marks on the way to it, outermost first."""
    paths = [path for path, _ in model.named_parameters(remove_duplicate=False)]
    return {path: _on_the_way(model, path, calls or {}) for path in paths}


@contextmanager
def _annotated(kind: HintKind, size: int | None) -> Iterator[None]:
    least = 0 if kind == "stage" else 1
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < least):
        raise PlanError(f"{kind}({size!r}): it must be a whole number from {least}")
    token = _around.set((*_around.get(), (kind, size)))
    called: list[nn.Module] = []
    calls = _tracing.get()
    hooks = [
        register_module_parameter_registration_hook(_mark_parameter),
        register_module_module_registration_hook(_mark_module),
    ]
    if calls is not None:
        hooks.append(register_module_forward_pre_hook(lambda module, _: called.append(module)))
    try:
        yield
    finally:
        around = _around.get()
        _around.reset(token)
        for hook in hooks:
            hook.remove()
    if calls is None:
        return
    for module in called:
        calls.setdefault(id(module.__dict__), around)
    if not any(True for module in called for _ in module.parameters()):
        inside = "" if size is None else str(size)
        raise TraceError(
            f"with {kind}({inside}) in a forward: nothing with parameters is called inside; call "
            "modules there, or put it around where they are made"
        )


def _marks(module: nn.Module) -> dict[str, Marks]:
    found: dict[str, Marks] = module.__dict__.setdefault(_MARKS, {})
    return found


def _mark_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    if around := _around.get():  # hooks are global: other threads are not inside
        _marks(module)[name] = around


def _mark_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if (around := _around.get()) and child is not None:
        _marks(child)[""] = around


def _on_the_way(model: nn.Module, path: str, calls: Calls) -> list[Mark]:
    *names, parameter = path.split(".")
    chain = [model]
    for name in names:
        chain.append(getattr(chain[-1], name))
    found = [mark for module in chain for mark in module.__dict__.get(_MARKS, {}).get("", ())]
    found += chain[-1].__dict__.get(_MARKS, {}).get(parameter, ())
    return found + [mark for module in chain for mark in calls.get(id(module.__dict__), ())]
