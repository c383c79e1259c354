"""How replicas agree on gradients, one file a form; the file name is its key. MESHWRIGHT_SYNC names
folders with more.

A file has `describe(replicas)`: what the form does in a step, as an `Exchange`.
"""

import sys
from functools import cache

from meshwright.forms.sync.exchange import Exchange
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.plan import Stage

add_folders("MESHWRIGHT_SYNC", __path__)

FILES = Files(sys.modules[__name__], "form of synchronisation")


@cache
def exchange(name: str, replicas: int) -> Exchange:
    """Returns what a form does among so many replicas. PlanError names the nearest known form."""
    describe = getattr(FILES.load(name), "describe", None)
    if describe is None:
        raise PlanError(f"{name!r} is no form of synchronisation: its file has no describe()")
    made: Exchange = describe(replicas)
    return made


def exchange_of(stage: Stage) -> Exchange:
    """Returns what a stage of a plan does."""
    return exchange(stage.sync, stage.dp)
