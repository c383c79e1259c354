"""What runs around forms, or several of them, hands on every call that a job may make."""

from inspect import signature
from unittest.mock import MagicMock

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


def test_what_is_handed_on_arrives() -> None:
    """At the form inside, with what was given."""
    inner = MagicMock(spec=SyncRun)
    run = AroundRun(inner)
    for name, made in vars(SyncRun).items():
        if name in ATTRIBUTES or name.startswith("_"):
            continue
        if isinstance(made, property):
            assert getattr(run, name) is getattr(inner, name), name
        elif callable(made):
            given = [object() for _ in list(signature(made).parameters)[1:]]
            getattr(run, name)(*given)
            getattr(inner, name).assert_called_once_with(*given)


def test_buffers_of_a_stage_go_to_one_form() -> None:
    """Of groups of parameters, the first whose replicas train alone: means are taken once."""
    runs = [MagicMock(spec=SyncRun, held=(), own_states=alone) for alone in (False, True, True)]
    buffers = [object()]
    GroupedRun(runs, []).take_buffers(buffers)  # type: ignore[arg-type]
    assert [run.take_buffers.call_count for run in runs] == [0, 1, 0]
    runs[1].take_buffers.assert_called_once_with(buffers)
