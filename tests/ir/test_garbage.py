"""Collections are rare while much is made, usual in jobs, and afterwards as they were."""

import gc
import weakref
from contextlib import ExitStack

import pytest
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.ir.garbage import (
    FEWER_OBJECTS,
    OBJECTS,
    keep_aside,
    rare_collections,
    take_back,
    usual_collections,
)
from meshwright.runtime.job.compile import compile as compile_job


def test_rare_inside_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        with rare_collections(FEWER_OBJECTS):
            assert gc.get_threshold() == (FEWER_OBJECTS, 10, 10)
            with rare_collections():
                assert gc.get_threshold() == (OBJECTS, 10, 10)
                usual_collections()
                assert gc.get_threshold() == (700, 10, 10), "as outside of all"
            assert gc.get_threshold() == (FEWER_OBJECTS, 10, 10)
        assert gc.get_threshold() == (700, 10, 10)
        usual_collections()  # nothing is under way
        with rare_collections():
            with pytest.raises(PlanError):
                compile_job(nn.Linear(1, 1), None, on_nonfinite="stopp")  # type: ignore[arg-type]
            assert gc.get_threshold() == (700, 10, 10), "in jobs, too"
        gc.set_threshold(0, 10, 10)
        with rare_collections():
            assert gc.get_threshold() == (0, 10, 10), "a caller wants none"
    finally:
        gc.set_threshold(*before)


def test_threads_that_leave_in_another_order() -> None:
    """A search beside training ends while another has begun."""
    before = gc.get_threshold()
    first, second = ExitStack(), ExitStack()
    try:
        gc.set_threshold(700, 10, 10)
        first.enter_context(rare_collections(FEWER_OBJECTS))
        second.enter_context(rare_collections(OBJECTS))
        first.close()
        assert gc.get_threshold() == (OBJECTS, 10, 10)
        second.close()
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        first.close()
        second.close()
        gc.set_threshold(*before)


class Ring:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_there_before_is_set_aside() -> None:
    take_back()  # what conftest has set aside
    try:
        before = weakref.ref(Ring())
        with rare_collections(set_aside=True):
            inside = weakref.ref(Ring())
            gc.collect()
            assert before() is not None and inside() is None
        assert not gc.get_freeze_count()
        gc.collect()
        assert before() is None
        before = weakref.ref(Ring())
        gc.freeze()  # a caller's
        with rare_collections(set_aside=True):
            pass
        gc.collect()
        assert before() is not None, "it stays as the caller has it"
    finally:
        keep_aside()


def test_what_is_kept_aside_is_not_counted_for_each_search(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back()
    try:
        garbage, ring = weakref.ref(Ring()), Ring()
        keep_aside()
        assert garbage() is None
        monkeypatch.delattr(gc, "get_freeze_count")
        with rare_collections(set_aside=True):
            pass
        kept = weakref.ref(ring)
        del ring
        gc.collect()
        assert kept() is not None
    finally:
        keep_aside()
