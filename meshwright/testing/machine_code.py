"""What a kernel became: its machine code for a GPU, made and read without one.

A kernel is compiled as a launch of its `Build` would have it, with pointers and numbers that 16
divides known as such, by the assembler that Triton brings; its disassembler then says the
instructions. Registers, spills and shared memory are those that the assembler reports.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.ir.launch import Build, triton

WIDTHS = (768, 1_600, 4_096, 8_192)
"""Of models, for kernels that name none of their own."""
LANES = 32
"""Threads of a warp."""
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
_READS, _WRITES = ("LDG", "LD"), ("STG", "ST")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a kernel's code."""

    place: int
    """Its number in the code, counted from 0."""
    name: str
    """With its suffixes, such as `LDG.E.128`."""
    operands: str
    guarded: bool
    """Whether it is only done where a predicate holds."""

    @property
    def kind(self) -> str:
        """Give its name without suffixes."""
        return self.name.partition(".")[0]

    @property
    def nbytes(self) -> int:
        """Count what one lane moves, if it is an access: bytes."""
        found = [_BITS[part] for part in self.name.split(".") if part in _BITS]
        return (found[-1] if found else 32) // 8

    @property
    def reads_memory(self) -> bool:
        """Say whether it loads from the device's memory."""
        return self.kind in _READS

    @property
    def writes_memory(self) -> bool:
        """Say whether it stores to the device's memory."""
        return self.kind in _WRITES

    def made(self) -> frozenset[int]:
        """Number the registers that a load fills."""
        first = _REGISTER.search(self.operands)
        count = max(1, self.nbytes // 4)
        return frozenset(range(int(first[1]), int(first[1]) + count)) if first else frozenset()

    def used(self) -> frozenset[int]:
        """Number the registers that it needs before it can begin."""
        given = self.operands if self.writes_memory else self.operands.partition(",")[2]
        found: set[int] = set()
        for number, pair in _REGISTER.findall(given):
            wide = 2 if pair else 1
            found |= set(range(int(number), int(number) + wide))
        if self.writes_memory:
            last = _REGISTER.findall(given)[-1:]
            found |= {int(n) + i for n, _ in last for i in range(max(1, self.nbytes // 4))}
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's machine code for one target."""

    target: int
    """80 or 90."""
    warps: int
    instructions: tuple[Instruction, ...]
    jumps: Mapping[int, int]
    """By number of a jump, the number of the instruction that it goes to."""
    registers: int
    shared_bytes: int
    spilled_bytes: int
    """Of a thread's registers that lie in memory."""

    @property
    def loops(self) -> tuple[tuple[int, int], ...]:
        """Number the first and last instruction of each loop."""
        return tuple((to, at) for at, to in self.jumps.items() if to < at)

    def spills(self) -> int:
        """Count the instructions that move registers out and in again."""
        return sum(i.kind in ("STL", "LDL") for i in self.instructions)

    def barriers(self) -> int:
        """Count where the threads of a program wait for each other."""
        return sum(i.kind == "BAR" for i in self.instructions)

    def hot(self, *, looped: bool) -> tuple[Instruction, ...]:
        """Give what runs where all lies as it should: of the whole code, or of the loop that moves
        most, the way through its branches that moves most bytes by 16-byte accesses."""
        spans = self.loops if looped and self.loops else ((0, len(self.instructions) - 1),)
        ways = [way_through(self.instructions, self.jumps, first, last) for first, last in spans]
        return max(ways, key=vector_bytes)

    def accesses(self) -> tuple[Instruction, ...]:
        """Give all that read and write the device's memory."""
        return tuple(i for i in self.instructions if i.reads_memory or i.writes_memory)


def vector_bytes(part: Sequence[Instruction]) -> int:
    """Count what one lane moves of the device's memory in pieces of 16 bytes."""
    return sum(i.nbytes for i in part if (i.reads_memory or i.writes_memory) and i.nbytes == 16)


def way_through(
    code: Sequence[Instruction], jumps: Mapping[int, int], first: int, last: int
) -> tuple[Instruction, ...]:
    """Give the instructions from `first` to `last` on the way that moves most 16-byte pieces, and
    among such ways the shortest; nothing is gone over twice."""
    best: dict[int, tuple[int, int, int]] = {last + 1: (0, 0, -1)}
    for place in range(last, first - 1, -1):
        now, after = code[place], [place + 1]
        target = jumps.get(place)
        if target is not None and place < target <= last + 1:
            after = [target, *(after if now.guarded else [])]
        elif now.kind == "EXIT" and not now.guarded:
            after = [last + 1]
        value, length, then = max((*best[to][:2], to) for to in after)
        best[place] = (value + vector_bytes([now]), length - 1, then)
    way, place = [], first
    while place <= last:
        way.append(code[place])
        place = best[place][2]
    return tuple(way)


def machine_code(build: Build, target: int) -> Code:
    """Compile a kernel for a compute capability such as 90, and read what came out.

    RuntimeError, in the assembler's words, if it can not be disassembled.
    """
    from triton import knobs  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    ones = {name: value for name, value in build.values.items() if value == 1}
    constants = {**build.constants, **ones}
    signature = {**build.signature, **dict.fromkeys(constants, "constexpr")}
    whole = {name for name, value in build.values.items() if value % 16 == 0}
    varying = {p.name for p in build.kernel.params if p.do_not_specialize}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(build.kernel.arg_names)
        if signature[name].startswith("*") or name in whole - varying
    }
    source = ASTSource(build.kernel, signature, constants, attributes)
    options = {"num_warps": build.warps, "num_stages": build.stages}
    made = triton.compile(source, target=GPUTarget("cuda", target, LANES), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        used = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        text = _run(knobs.nvidia.nvdisasm.path, "-c", file.name)
    instructions, jumps = _read(text)
    counts = {key: int(n) for key, n in re.findall(r"(REG|LOCAL|STACK):(\d+)", used)}
    return Code(
        target, made.metadata.num_warps, instructions, jumps, counts["REG"], made.metadata.shared,
        max(counts["LOCAL"], counts["STACK"]),
    )  # fmt: skip


def _run(*arguments: str) -> str:
    ran = subprocess.run(arguments, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{Path(arguments[0]).name} failed: {ran.stderr.strip()}")
    return ran.stdout


def _read(text: str) -> tuple[tuple[Instruction, ...], dict[int, int]]:
    """Instructions, and where jumps go among them."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif (match := _LINE.match(line)) and match[3] != "NOP":
            found.append(Instruction(len(found), match[3], match[4].strip(), bool(match[2])))
    jumps = [(i, _TARGET.search(i.operands)) for i in found if i.kind == "BRA"]
    inside = {i.place: labels[to[1]] for i, to in jumps if to and labels[to[1]] != i.place}
    return tuple(found), inside
