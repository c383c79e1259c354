"""What of gradients is still on its way to the host, by hand."""

from meshwright.costmodel.memory.leaving import LATE, Leaving, OnTheWay, on_the_way


def test_a_fast_link_has_taken_them() -> None:
    """Three blocks of 4 s have most after 1 s; copies take 2 s: of the newest a half is left."""
    first, later = on_the_way([Leaving(1.0, 4.0, 2.0)] * 3, forward_s=10.0, in_flight=2)
    assert first == (OnTheWay(0.5, 0.0, 0.0), OnTheWay(0.5, 0.0, 0.0), OnTheWay(0.0, 0.0, 0.0))
    assert later == first


def test_a_slow_link_has_all_that_may_be() -> None:
    """Copies of 10 s beside blocks of 1 s: two are on their way, and blocks wait for the third."""
    first, later = on_the_way([Leaving(0.0, 1.0, 10.0)] * 4, forward_s=1.0, in_flight=2)
    # In turn: nothing; the first (all of it); that with 9 s left as the second waits behind it ...
    assert first[3] == OnTheWay(0.0, 0.0, 0.0)
    assert first[2] == OnTheWay(1.0, 0.0, 0.9)
    assert first[1] == OnTheWay(1.0, 0.9, 1.0)  # the third waits until the first has gone
    assert first[0] == OnTheWay(1.0, 1.0, 1.0) == LATE
    assert later[3].newest == 1.0 and 0.8 < later[3].before < 1.0


def test_blocks_that_send_nothing_have_none() -> None:
    first, _ = on_the_way([Leaving(1.0, 2.0, 0.0)] * 2, forward_s=1.0, in_flight=2)
    assert set(first) == {OnTheWay(0.0, 0.0, 0.0)}
