"""Folders of a user's own with more searchers or schedules, named by environment variables."""

import os
from collections.abc import MutableSequence
from pathlib import Path

from meshwright.ir.errors import PlanError


def add_folders(variable: str, path: MutableSequence[str]) -> None:
    """Adds the folders that an environment variable names to the path of a package."""
    for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
        if not Path(folder).is_dir():
            raise PlanError(f"{variable}: {folder!r} is no folder")
        path.append(folder)
