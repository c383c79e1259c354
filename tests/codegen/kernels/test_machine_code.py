"""Machine code of kernels at widths of real models: wide accesses, no spills, near a copy's speed;
and that the reader sees where that is not so."""

import pytest

from meshwright.ir.kernels import (
    bucket,
    compiled,
    cross_entropy,
    gather_linear,
    linear_scatter,
    swiglu,
)
from meshwright.ir.launch import Build
from meshwright.testing.copy_share import broken, busiest, copy_share, round_trips
from meshwright.testing.machine_code import WIDTHS, Instruction, machine_code, way_through

pytest.importorskip("triton")
BOUND = [
    (module.__name__.rpartition(".")[2], build)
    for module in compiled()
    for build in module.builds("bf16", getattr(module, "WIDTHS", WIDTHS)[1])
    if build.moves
]


@pytest.mark.parametrize(("name", "build"), BOUND, ids=[name for name, _ in BOUND])
def test_what_memory_bounds_reaches_a_copys_speed(name, build):
    assert broken(copy_share(build, 90)) == ""


@pytest.mark.parametrize("file", [gather_linear, linear_scatter])
@pytest.mark.parametrize(("element", "sm"), [("bf16", 90), ("fp32", 80)])
def test_products_spill_nothing_and_store_whole_rows(file, element, sm):
    """Also with the weight transposed, and where two bytes go by descriptors (TMA), with these."""
    builds = [b for b in file.builds(element, 4096) if not b.moves and b.is_for(sm)]
    assert [b.constants["READ"] for b in builds] == ([0, 0, 1, 2] if sm == 90 else [0, 0])
    for build in builds:
        code = machine_code(build, sm)
        assert code.spills() == code.spilled_bytes == 0
        by_descriptor = any(i.kind == "UTMALDG" for i in code.instructions)
        assert by_descriptor == bool(build.constants["READ"])
        assert {i.name for i in code.accesses() if i.writes_memory} == {"STG.E.128"}


def test_rows_of_an_odd_width_are_among_them():
    assert cross_entropy.WIDTHS[1] == 50_257


def _swiglu(**changes) -> Build:
    first = next(iter(swiglu.builds("bf16", 4096)))
    kept = {name: getattr(first, name) for name in ("kernel", "signature", "constants", "moves")}
    return Build(**{**kept, "values": first.values, **changes})


def test_what_breaks_a_rule_is_seen():
    assert broken(copy_share(_swiglu(), 90)) == ""
    # A number of elements that 16 does not divide: one access per element.
    assert "0% of what is to be moved goes by 16" in broken(
        copy_share(_swiglu(values={"count": 16 * 4096 + 1}), 90)
    )
    wide = {**_swiglu().constants, "BLOCK": 8192}
    assert "registers are spilled" in broken(
        copy_share(_swiglu(constants=wide, warps=1, moves=6 * 8192), 90)
    )
    # Half of what is moved would have been enough.
    assert "50% of a copy" in broken(copy_share(_swiglu(moves=3 * 1024), 90))


def test_the_way_that_moves_most_is_read():
    """A bucket's kernel has a way for tensors that lie anywhere, too."""
    code = copy_share(next(iter(bucket.builds("bf16", 0))), 90).code
    taken = {i.name for i in code.hot(looped=False) if i.writes_memory}
    assert taken == {"STG.E.128"}
    assert "STG.E" in {i.name for i in code.accesses() if i.writes_memory}


def _code(*lines: str) -> tuple[Instruction, ...]:
    found = [line.split(" ", 1) for line in lines]
    return tuple(
        Instruction(place, name.lstrip("@"), operands, name.startswith("@"))
        for place, (name, operands) in enumerate(found)
    )


def test_jumps_round_trips_and_cycles_by_hand():
    code = _code(
        "LDG.E.64 R2, desc[UR4][R4.64]",
        "@BRA `(.L_x_1)",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "LDG.E.128 R12, desc[UR4][R2.64+0x10]",
        "FADD R0, R9, R14",
        "EXIT -",
        "LDG.E.U16 R6, desc[UR4][R2.64]",
        "EXIT -",
    )
    way = way_through(code, {1: 6}, 0, len(code) - 1)
    assert [i.place for i in way] == [0, 1, 2, 3, 4, 5]
    # The address waits for the first load; the sum for both that were begun together.
    assert round_trips(way) == 2
    # Four cycles for each of two loads of 16 bytes a lane, two for that of 8.
    assert busiest(way, 90) == 4 + 4 + 2
