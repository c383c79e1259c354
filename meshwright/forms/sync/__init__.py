"""How replicas agree on gradients: one form a file, whose name is its key in a plan.
MESHWRIGHT_SYNC names folders with more.

A file has `describe(replicas)`, what the form does in a step as an `Exchange`, and `build`, what
does it.
"""

import sys
from functools import cache
from typing import cast

from meshwright.forms.sync.exchange import Exchange
from meshwright.forms.sync.running import RunningForm
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.plan import Stage

add_folders("MESHWRIGHT_SYNC", __path__)
_FILES = Files(sys.modules[__name__], "form of synchronisation")


def running(key: str) -> RunningForm:
    """Returns the half of the form `key` that runs; the key is that of a file in this folder."""
    return cast(RunningForm, _FILES.load(key))


@cache
def exchange(key: str, replicas: int) -> Exchange:
    """Returns what the form `key` does among so many replicas. PlanError if there is no such form:
    it names the nearest."""
    describe = getattr(_FILES.load(key), "describe", None)
    if describe is None:
        raise PlanError(f"{key!r} is no form of synchronisation: its file has no describe()")
    return cast(Exchange, describe(replicas))


def exchange_of(stage: Stage) -> Exchange:
    """Returns what a stage of a plan does."""
    return exchange(stage.sync_form, stage.dp)
