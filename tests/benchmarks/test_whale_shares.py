"""Whale's uneven shares beside exact ones: never better, memory kept by both."""

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.whale_shares import ReplicaDevice, whale_shares
from meshwright.planner.across.balance import Replica, exact_shares

DEVICES = st.builds(
    lambda flops, memory, fixed, sample: ReplicaDevice(float(flops), float(memory), fixed, sample),
    st.integers(1, 20), st.integers(8, 64), st.integers(0, 10), st.sampled_from([0.5, 1, 2, 4]),
)  # fmt: skip


@given(st.integers(1, 64), st.lists(DEVICES, min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_whale_is_never_better_and_both_keep_memory(
    samples: int, devices: list[ReplicaDevice]
) -> None:
    replicas = [
        Replica(tuple(n / d.flops for n in range(1, samples + 1)), int(min(samples, d.most)))
        for d in devices
    ]
    exact, whale = exact_shares(samples, replicas), whale_shares(samples, devices)
    assert (exact is None) == (whale is None)
    if exact is None or whale is None:
        return
    for shares in (exact, whale):
        assert sum(shares) == samples and min(shares) >= 1
        assert all(d.used(n) <= 1 for d, n in zip(devices, shares, strict=True))
    slowest = [
        max(r.seconds[n - 1] for r, n in zip(replicas, shares, strict=True))
        for shares in (exact, whale)
    ]
    assert slowest[0] <= slowest[1]


def test_whale_moves_load_from_the_fullest_to_the_least_busy() -> None:
    fast, slow = ReplicaDevice(3.0, 10.0, 2.0, 1.0), ReplicaDevice(1.0, 100.0, 2.0, 1.0)
    # In proportion 12:4, but the fast one holds 8.
    assert whale_shares(16, [fast, slow]) == (8, 8)
    # In proportion 12:4:8; both others are as busy, the emptier one takes all of it.
    assert whale_shares(24, [fast, slow, ReplicaDevice(2.0, 12.0, 2.0, 1.0)]) == (8, 8, 8)
    # One that is free but too full for all of it gives the rest to the next.
    nearly = ReplicaDevice(1.0, 80.0, 74.0, 1.0)
    others = [nearly, ReplicaDevice(2.0, 99.0, 97.0, 0.1)]
    assert whale_shares(30, [ReplicaDevice(3.0, 80.0, 68.0, 1.0), *others]) == (12, 6, 12)
    assert whale_shares(30, [ReplicaDevice(3.0, 80.0, 69.0, 1.0), nearly]) is None
    assert whale_shares(40, [fast, ReplicaDevice(3.0, 10.0, 2.0, 1.0)]) is None
