"""How near to a plain copy's bandwidth a kernel's machine code can come, counted, not measured.

Four counts bound it. Bytes: what its lanes move against what it cannot do without. Issue: the
cycles that its instructions take on the busiest of a processor's units. Near: what all programs
read again comes from the cache. Waiting: a program's round trips to memory, one after the other
and at least one, with as many programs at once as registers, threads and shared memory leave room
for. The least of the last three, times the first, is the share.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.ir.launch import Build
from meshwright.testing.machine_code import (
    LANES,
    Code,
    Instruction,
    machine_code,
    vector_bytes,
)

WHOLE, LEAST = 0.95, 0.85
"""What kernels must reach: of what is to be moved, in pieces of 16 bytes; of a copy's bandwidth."""
SECTOR = 32
"""Bytes that memory hands out at least."""


@dataclass(frozen=True, slots=True)
class Processor:
    """One of a GPU's streaming multiprocessors."""

    bytes_per_ns: float
    """Its part of the bandwidth that a copy reaches."""
    cycles_per_ns: float
    shared_bytes: int
    threads: int
    latency_ns: float
    """Of memory under load."""
    near: float
    """How many times a copy's bandwidth the cache has that all processors share."""
    barrier_ns: float = 40.0
    """In which the threads of a program wait for each other."""


PROCESSORS = {
    80: Processor(0.9 * 2039 / 108, 1.41, 164 * 1024, 2048, 600.0, 2.0),
    90: Processor(0.9 * 3350 / 132, 1.755, 228 * 1024, 2048, 650.0, 1.6),
}
"""A100-SXM-80GB and H100-SXM: data sheets; a copy at 0.9 of the sheet, the latency under load, the
cache's bandwidth and the time of a barrier are assumptions."""
REGISTERS, PROGRAMS = 65_536, 32
_HALF = ("IMAD", "LEA", "SHF", "PRMT", "LOP3", "ISETP", "FSETP", "SEL", "FSEL", "IADD3", "FMNMX",
         "VIADD", "IABS", "F2FP", "SHFL", "ISET", "MOV", "PLOP3")  # fmt: skip
"""Integers, comparisons and moves of bits: 64 lanes a cycle."""
_SLOW = ("MUFU", "F2F", "I2F", "F2I", "I2I", "FRND", "POPC", "FLO", "I2FP")
"""Functions and conversions: 16 lanes a cycle."""
_DOUBLE = ("DADD", "DMUL", "DFMA", "DSETP")
_LOCAL = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS", "ATOMG", "RED")


@dataclass(frozen=True, slots=True)
class Share:
    """A kernel's counts for one target."""

    code: Code
    moves: float
    """Bytes that a program, or a turn of its loop, cannot do without."""
    by_vectors: float
    """What lanes move in pieces of 16 bytes, without what masks leave out, to what they have to."""
    moved: float
    """Bytes of memory, pieces at the edges as whole sectors."""
    programs: int
    """At once on a processor."""
    trips: int
    """To memory, one after the other."""
    issue_share: float
    near_share: float
    waiting_share: float

    @property
    def share(self) -> float:
        """Estimate the part of a copy's bandwidth that is used for what must be moved."""
        bounds = (1.0, self.issue_share, self.near_share, self.waiting_share)
        return min(bounds) * min(1.0, self.moves / self.moved)


def copy_share(build: Build, target: int) -> Share:
    """Compile a memory-bound kernel and count; `build.moves` is not 0."""
    code = machine_code(build, target)
    part, unit = code.hot(looped=build.looped), PROCESSORS[target]
    accesses = [i for i in part if i.reads_memory or i.writes_memory]
    lanes = LANES * code.warps
    # A compiler may have put several turns into one.
    needed = build.moves + build.cached
    turns = max(1, round(vector_bytes(part) * lanes * build.filled / needed))
    turns = turns if build.looped else 1
    moves, cached = build.moves * turns, build.cached * turns
    by_vectors = vector_bytes(part) * lanes * build.filled
    narrow = [i for i in accesses if i.nbytes < 16]
    whole = by_vectors >= 0.95 * (moves + cached)
    at_edges = SECTOR * len(narrow) if whole else lanes * sum(max(1, i.nbytes) for i in narrow)
    moved = max(0.0, by_vectors - cached) + at_edges
    programs, trips = min(build.most, at_once(code, unit)), round_trips(part)
    cycles = busiest(part, target) * code.warps
    copied_ns = moved / unit.bytes_per_ns
    pauses = sum(i.kind == "BAR" for i in part)
    alone_ns = (
        max(1, trips) * unit.latency_ns + cycles / unit.cycles_per_ns + pauses * unit.barrier_ns
    )
    return Share(
        code, moves, by_vectors / (moves + cached), moved, programs, trips,
        issue_share=copied_ns * unit.cycles_per_ns / cycles,
        near_share=unit.near * moved / (moved + cached),
        waiting_share=programs * copied_ns / alone_ns,
    )  # fmt: skip


def broken(share: Share) -> str:
    """Say which rule for memory-bound kernels the code breaks; "" if none."""
    if share.code.spills() or share.code.spilled_bytes:
        return f"{share.code.spilled_bytes} bytes of registers are spilled"
    if share.by_vectors < WHOLE:
        return f"{share.by_vectors:.0%} of what is to be moved goes by 16 bytes, not {WHOLE:.0%}"
    if share.share < LEAST:
        return f"{share.share:.0%} of a copy's bandwidth, not {LEAST:.0%}"
    return ""


def at_once(code: Code, unit: Processor) -> int:
    """Count the programs that fit on a processor together."""
    threads = LANES * code.warps
    held = -(-code.registers // 8) * 8 * threads
    shared = code.shared_bytes + 1024
    return min(PROGRAMS, unit.threads // threads, REGISTERS // held, unit.shared_bytes // shared)


def busiest(part: Sequence[Instruction], target: int) -> float:
    """Count the cycles that a warp takes of the unit which it keeps longest, of four schedulers,
    and of those for plain, half-rate and slow arithmetic, for doubles, and for memory."""
    count: Counter[str] = Counter()
    for one in part:
        kind, plain = one.kind, one.kind.startswith("IMAD") and ".MOV" in one.name
        count["issue"] += 1
        count["half"] += kind.startswith(_HALF) and not plain
        count["slow"] += kind.startswith(_SLOW)
        count["double"] += kind.startswith(_DOUBLE)
        if kind in _LOCAL:
            # 128 bytes of a warp pass in a cycle.
            count["memory"] += max(1, one.nbytes * LANES // 128)
    doubles = 0.5 if target == 90 else 1.0
    cycles = {"issue": 0.25, "half": 0.5, "slow": 2.0, "double": doubles, "memory": 1.0}
    return max(count[unit] * each for unit, each in cycles.items())


def round_trips(part: Sequence[Instruction]) -> int:
    """Count how often something waits for loads, all that were begun before it at once."""
    waited, begun = 0, set[int]()
    for one in part:
        if begun & one.used():
            waited, begun = waited + 1, set()
        if one.reads_memory:
            begun |= one.made()
    return waited
