"""Kinds of devices that tiles are chosen for, and what is read of machine code for that."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.ir.tiles import ANY
from meshwright.testing.copy_share import PROCESSORS, busiest
from meshwright.testing.machine_code import Code, Instruction

COUNT = "count"
_PRODUCTS = ("HGMMA", "HMMA", "FFMA")


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of device."""

    capability: int
    processors: int
    shared_bytes: int
    """That a program may have."""
    flops_per_cycle: dict[int, int]
    """Of a processor, by bytes of a value."""


TARGETS = {
    "sm_80": Target(80, 108, 163 * 1024, {2: 2048, 4: 128}),
    "sm_90": Target(90, 132, 227 * 1024, {2: 4096, 4: 256}),
    ANY: Target(80, 68, 48 * 1024, {2: 1024, 4: 128}),
}
"""A100, H100, and one that has no more than all have: data sheets."""


def is_legal(device: str, code: Code) -> bool:
    """Whether it spills nothing and fits."""
    fits = code.shared_bytes <= TARGETS[device].shared_bytes
    return fits and not code.spills() and not code.spilled_bytes


def turn_cycles(
    device: str, code: Code, warps: int, flops: float, read_bytes: int, item_bytes: int
) -> float:
    """Counts the cycles in which a processor takes a turn of a program's loop: those of the busiest
    of its tensor cores, of the cache that all share, and of what executes the instructions."""
    target, unit = TARGETS[device], PROCESSORS[TARGETS[device].capability]
    near = unit.near * unit.bytes_per_ns / unit.cycles_per_ns
    return max(
        flops / target.flops_per_cycle[item_bytes], read_bytes / near,
        busiest(innermost(code), target.capability) * warps,
    )  # fmt: skip


def innermost(code: Code) -> Sequence[Instruction]:
    """The shortest of the loops that multiply most."""
    loops = [code.instructions[first : last + 1] for first, last in code.loops]
    return max(loops, key=lambda loop: (sum(i.kind in _PRODUCTS for i in loop), -len(loop)))
