"""What runs around forms, or several of them, hands on every call that a job may make."""

import pytest

from meshwright.forms.around import AroundRun
from meshwright.forms.grouped import GroupedRun
from meshwright.forms.running import SyncRun

ATTRIBUTES = {"held", "whole_updates", "own_states", "reads_batches"}
"""Set when they are made."""


@pytest.mark.parametrize("kind", [AroundRun, GroupedRun])
def test_every_call_is_handed_on(kind: type[SyncRun]) -> None:
    calls = {name for name in vars(SyncRun) if not name.startswith("_")} - ATTRIBUTES
    assert calls <= set(vars(kind))
