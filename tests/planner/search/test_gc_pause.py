"""What was there before a search is not gone through while it runs, and is again afterwards."""

import gc
import weakref

from meshwright.planner.search.gc_pause import OBJECTS, rare_collections


class Ring:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.own = self


def test_only_what_is_made_inside_is_collected_there() -> None:
    usual, before = gc.get_threshold(), weakref.ref(Ring())
    with rare_collections():
        assert gc.get_threshold() == (max(OBJECTS, usual[0]), *usual[1:])
        inside = weakref.ref(Ring())
        gc.collect()
        assert before() is not None and inside() is None
    assert gc.get_threshold() == usual and not gc.get_freeze_count()
    gc.collect()
    assert before() is None


def test_what_a_caller_has_set_aside_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with rare_collections():
            pass
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
