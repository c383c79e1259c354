"""Collections are rare while much is made, usual in jobs, and afterwards as they were."""

import gc

from meshwright.ir.garbage import FEWER_OBJECTS, OBJECTS, rare_collections, usual_collections


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
        gc.set_threshold(0, 10, 10)
        with rare_collections():
            assert gc.get_threshold() == (0, 10, 10), "a caller wants none"
    finally:
        gc.set_threshold(*before)
