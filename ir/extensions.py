"""Packages whose files are a table: a file's name is its key. Users add folders of their own."""

import difflib
import os
import pkgutil
from collections.abc import Iterable, MutableSequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.ir.errors import PlanError


def add_folders(variable: str, path: MutableSequence[str]) -> None:
    """Adds the folders that an environment variable names to the path of a package."""
    for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
        if not Path(folder).is_dir():
            raise PlanError(f"{variable}: {folder!r} is no folder")
        if folder not in path:
            path.append(folder)


def nearest(name: str, known: Iterable[str]) -> str:
    """Finds the known name that looks most like `name`, among those that begin with it if any do:
    `h100` means `h100-sxm` rather than `p100`. Empty if none is known."""
    names = list(known)
    begun = [other for other in names if name and other.lower().startswith(name.lower())]
    return next(iter(difflib.get_close_matches(name, begun or names, 1, 0.0)), "")


class Files:
    """The files of a package by key, each imported when it is first asked for."""

    def __init__(self, package: ModuleType, what: str, *, dashed: bool = False) -> None:
        """`what` a file is, for errors; `dashed` keys have a dash for each underscore."""
        self._package, self._what, self._dashed = package, what, dashed

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All keys; PlanError where two folders have a file of the same name."""
        found: dict[str, str] = {}
        for folder in self._package.__path__:
            for module in pkgutil.iter_modules([folder]):
                if module.name in found:
                    raise PlanError(
                        f"{folder}: a {self._what} {module.name!r} is in {found[module.name]} "
                        "too; give the file another name"
                    )
                found[module.name] = folder
        return tuple(name.replace("_", "-") if self._dashed else name for name in found)

    def check(self, name: str, *also: str) -> None:
        """PlanError with the nearest key if `name` is none; `also` names what is legal besides."""
        if name not in self.names:
            known = (*also, *self.names)
            near = nearest(name, known)
            raise PlanError(f"no {self._what} {name!r}; nearest is {near!r} of {', '.join(known)}")

    def load(self, name: str) -> Any:
        """The module of a key; PlanError with the nearest one if there is none."""
        self.check(name)
        return import_module(f"{self._package.__name__}.{self._stem(name)}")

    def file(self, name: str) -> Path:
        """Where a key's file is, which is not imported; PlanError as of `load`."""
        self.check(name)
        there = (Path(folder) / self._stem(name) for folder in self._package.__path__)
        found = (at for path in there for at in (path.with_suffix(".py"), path / "__init__.py"))
        return next(at for at in found if at.exists())

    def _stem(self, name: str) -> str:
        return name.replace("-", "_") if self._dashed else name
