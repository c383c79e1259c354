"""How replicas agree on gradients: one form a file, whose name is its key in a plan."""

from importlib import import_module
from typing import cast

from meshwright.forms.sync.running import RunningForm


def running(key: str) -> RunningForm:
    """Returns the half of the form `key` that runs; the key is that of a file in this folder."""
    return cast(RunningForm, import_module(f"meshwright.forms.sync.{key}"))
