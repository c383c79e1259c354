"""Measurements that look disturbed: what varies much, and what more work beats."""

from dataclasses import replace

from meshwright.ir.profile.outliers import outliers
from meshwright.ir.profile.profile import (
    BlockRecord,
    CollectiveRecord,
    CopyRecord,
    GroupShape,
    Machine,
    OpRecord,
    OptimizerRecord,
    Profile,
    Timing,
)

HERE = Machine(device="a", kind="cpu", driver="", torch="2", backend="gloo")


def timing(median_s: float, spread: float = 0.02) -> Timing:
    return Timing(median_s=median_s, spread=spread, count=9)


def copy(nbytes: int, time: Timing) -> CopyRecord:
    return CopyRecord(direction="to_host", nbytes=nbytes, time=time)


def sent(nbytes: int, time: Timing, *, size: int = 2, loaded: bool = False) -> CollectiveRecord:
    group = GroupShape(size=size, per_node=size)
    return CollectiveRecord(
        operation="all_reduce", nbytes=nbytes, group=group, groups_at_once=1, time=time,
        loaded=loaded,
    )  # fmt: skip


def block(samples: int, forward: Timing, saved: int = 4000, tp: int = 1) -> BlockRecord:
    return BlockRecord(
        key=f"{samples} {saved} {tp}", pattern="h.*", samples=samples, tp=tp, processes=1,
        forward=forward, backward=timing(samples * 1e-2), backward_input=None,
        backward_weight=None, saved_bytes=saved * samples,
    )  # fmt: skip


def of(*blocks: BlockRecord) -> Profile:
    return Profile(machine=HERE, blocks={one.key: one for one in blocks})


def test_a_calm_profile_has_none() -> None:
    copies = tuple(copy(n << 20, timing(n * 1e-3)) for n in (1, 2, 4))
    assert outliers(Profile(machine=HERE)) == ()
    assert outliers(Profile(machine=HERE, copies=copies)) == ()


def test_all_kinds_that_vary_much_are_told_the_worst_first() -> None:
    op = OpRecord(
        key="mm", target="mm", op_class="matmul", dtype="float32", inputs=((8, 4), (4, 2)),
        flops=1.0, moved_bytes=1.0, forward=timing(1.0), backward=timing(1.0, 0.7),
    )  # fmt: skip
    adam = OptimizerRecord(optimizer="adamw", num_tensors=3, nbytes=1 << 20, time=timing(1.0, 0.5))
    profile = replace(
        of(block(1, timing(1e-2, 0.4))), ops={"mm": op}, optimizers=(adam,),
        collectives=(sent(1 << 20, timing(1.0, 0.6)),),
        copies=(copy(1 << 20, timing(1.0, 0.3)), *(copy(n << 20, timing(n)) for n in range(2, 9))),
    )  # fmt: skip
    found = outliers(profile)
    assert [one.time.spread for one in found] == [0.7, 0.6, 0.5, 0.4, 0.3]
    assert [one.what.partition(",")[0].split(" of ")[0] for one in found] == [
        "op mm 8x4: backward", "all_reduce", "adamw", "block h.*", "copy to_host",
    ]  # fmt: skip
    assert found[0].why == "varies by 70%, half of all by less than 2%"


def test_what_varies_as_much_as_the_rest_is_not_told() -> None:
    """On a machine that always varies, four times as much as usual is much."""
    copies = [copy(n << 20, timing(n, 0.2)) for n in range(1, 8)]
    told = [
        outliers(Profile(machine=HERE, copies=(*copies, copy(9 << 20, timing(9.0, spread)))))
        for spread in (0.75, 0.85)
    ]
    assert [len(found) for found in told] == [0, 1]


def test_what_takes_longer_than_more_of_the_same_is_told_once() -> None:
    (found,) = outliers(of(block(1, timing(4e-2)), block(2, timing(2e-2)), block(4, timing(4e-2))))
    assert found.what == "block h.*, 1 samples, tp 1, 1 at once: forward"
    assert found.why == "takes 2.0 times as long as block h.*, 2 samples, tp 1, 1 at once: forward"
    calm = [copy(n << 20, timing(n)) for n in (2, 3, 4)]
    (slow,) = outliers(Profile(machine=HERE, copies=(copy(1 << 20, timing(4.0, 0.9)), *calm)))
    assert slow.why.startswith("varies by 90%")  # and is beaten
    little = Profile(machine=HERE, copies=(copy(1 << 20, timing(1.2)), copy(2 << 20, timing(1.0))))
    assert outliers(little) == ()


def test_only_the_same_is_compared() -> None:
    """Blocks that keep other amounts, other groups, and what computes meanwhile differ."""
    assert outliers(of(block(1, timing(4e-2)), block(2, timing(2e-2), saved=8000))) == ()
    assert outliers(of(block(1, timing(4e-2)), block(2, timing(2e-2), tp=2))) == ()
    small = sent(1 << 20, timing(4.0))
    for more in (sent(2 << 20, timing(1.0), size=4), sent(2 << 20, timing(1.0), loaded=True)):
        assert outliers(Profile(machine=HERE, collectives=(small, more))) == ()
    (found,) = outliers(Profile(machine=HERE, collectives=(small, sent(2 << 20, timing(1.0)))))
    assert found.what.startswith("all_reduce of 1 MiB over 2 ranks")
