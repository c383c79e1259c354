"""Which dtype each module reads its parameters in, and what is cast on the way in and out."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.ir.errors import TraceError
from meshwright.ir.extensions import nearest
from meshwright.ir.precision import CopyTypes, Precision
from meshwright.ir.torch_private import map_tensors


def wide_parameters(model: nn.Module, copies: CopyTypes) -> frozenset[int]:
    """Ids of the parameters that are read as they are stepped, and not as narrower copies: those of
    modules that the precision says so of, and those beside running statistics, which torch's
    kernels want in one dtype. TraceError for one that modules of both kinds have, and for a pattern
    that names none."""
    normed = frozenset(
        id(parameter) for module in model.modules()
        if getattr(module, "running_mean", None) is not None
        for parameter in module.parameters(recurse=False)
    )  # fmt: skip
    if copies.numbers is None:
        return normed
    _check_patterns(model, copies.numbers)
    found: dict[int, tuple[bool, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        wide = copies.read_by(path) is copies.stepped
        for name, parameter in module.named_parameters(path, recurse=False):
            was, other = found.setdefault(id(parameter), (wide, name))
            if was is not wide:
                raise TraceError(
                    f"{other} and {name} are one parameter, and the precision has it in "
                    f"{copies.stepped} for one module and in {copies.read} for the other: say the "
                    "same of both"
                )
    return normed | {key for key, (wide, _) in found.items() if wide}


def _check_patterns(model: nn.Module, numbers: Precision) -> None:
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for pattern, _ in numbers.within[1:]:
        if pattern not in paths and not any(fnmatchcase(path, pattern) for path in paths):
            raise TraceError(
                f"precision: {pattern!r} names no module; nearest is {nearest(pattern, paths)!r}"
            )


def _with_dtypes(model: nn.Module, copies: CopyTypes) -> Iterator[tuple[nn.Module, torch.dtype]]:
    """Yields modules with the dtype of each, those left out that have several paths in modules of
    both kinds: without parameters, they compute in that of the module that calls them. TraceError
    where the precision says something of one of these paths alone."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # Within a trace, torch has proxies of it, one for each path.
        found.setdefault(id(module.__dict__), (module, []))[1].append(path)
    for module, paths in found.values():
        dtypes = [copies.read_by(path) for path in paths]
        if len(set(dtypes)) == 1:
            yield module, dtypes[0]
            continue
        for path, own in zip(paths, dtypes, strict=True):
            if own is not copies.read_by(path.rpartition(".")[0]):
                raise TraceError(
                    f"{' and '.join(paths)} are one module, and the precision has it in {own} as "
                    f"{path!r} alone: say the same of all"
                )


class ModuleCasts:
    """Casts between modules that read parameters in different dtypes: what goes into one in the
    dtype of the module that calls it comes in its own, and what it makes goes back in the caller's.
    What the last such module makes is kept as it is, for a loss."""

    def __init__(self, copies: CopyTypes) -> None:
        self._copies = copies
        self._open: list[torch.dtype] = []
        """Of the modules that run, the innermost last."""
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What was cast to narrower numbers when a module ended, and as it was; by id."""

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Inside, calls of the model's modules are so."""
        if self._copies.numbers is None:
            yield
            return
        with ExitStack() as stack:
            self._open = [self._copies.read_by("")]
            for module, own in _with_dtypes(model, self._copies):
                has = any(True for _ in module.parameters())
                enter = module.register_forward_pre_hook(
                    partial(self._enter, own, has), with_kwargs=True
                )
                leave = module.register_forward_hook(partial(self._leave, own))
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            try:
                yield
            finally:
                self._made.clear()

    def as_made(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor as the last module made it, before it was cast."""
        narrow, wide = self._made.get(id(x), (None, x))
        return wide if narrow is x else x

    def _enter(
        self, own: torch.dtype, has_parameters: bool, _: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        if has_parameters:
            self._made.clear()
        outer = self._open[-1]
        self._open.append(own)
        if own is outer:
            return args, kwargs
        found: tuple[Any, Any] = map_tensors(self._to(outer, own), (args, kwargs))
        return found

    def _leave(self, own: torch.dtype, _: nn.Module, __: Any, made: Any) -> Any:
        self._open.pop()
        outer = self._open[-1]
        return made if own is outer else map_tensors(self._to(own, outer, keep=True), made)

    def _to(self, source: torch.dtype, target: torch.dtype, *, keep: bool = False) -> Any:
        def cast(x: torch.Tensor) -> torch.Tensor:
            if x.dtype is not source or not x.ndim:
                return x
            found = x.to(target)
            if keep and target is self._copies.read:
                self._made[id(found)] = found, x
            return found

        return cast
