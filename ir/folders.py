"""Packages with one file per form, schedule or searcher: the file name is its key. Environment
variables name folders of a user's own with more of them."""

import difflib
import importlib
import os
import pkgutil
from collections.abc import MutableSequence
from pathlib import Path
from types import ModuleType

from meshwright.ir.errors import PlanError


def add_folders(variable: str, path: MutableSequence[str]) -> None:
    """Adds the folders that an environment variable names to the path of a package."""
    for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
        if not Path(folder).is_dir():
            raise PlanError(f"{variable}: {folder!r} is no folder")
        path.append(folder)


def keys_of(package: ModuleType) -> tuple[str, ...]:
    """Lists the keys of a package: the names of its files, its own before a user's."""
    return tuple(dict.fromkeys(found.name for found in pkgutil.iter_modules(package.__path__)))


def load(package: ModuleType, key: str, what: str) -> ModuleType:
    """Loads the file of a key. PlanError names the nearest if there is none; `what`: in words."""
    known = keys_of(package)
    if key not in known:
        near = difflib.get_close_matches(key, known, 1, 0.0)[0]
        raise PlanError(f"no {what} {key!r}; nearest is {near!r} of {', '.join(known)}")
    return importlib.import_module(f"{package.__name__}.{key}")
