"""Machine code of all kernels for sm_80 and sm_90: accesses, spills, estimated share of a copy.

python -m benchmarks.kernel_code [--out docs/results/kernel_code.md]

Compiles every kernel without a GPU at widths of real models, as launches would have it, and reads
its disassembly. Nothing is measured. Exits with 1 if a memory-bound kernel breaks a rule.
"""

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from types import ModuleType

from meshwright.ir.kernels import compiled
from meshwright.ir.launch import Build, triton
from meshwright.testing.copy_share import LEAST, PROCESSORS, WHOLE, Share, broken, copy_share
from meshwright.testing.machine_code import WIDTHS, Code, machine_code

ELEMENTS = ("bf16", "fp32")
HEAD = (
    "kernel", "of", "widths", "sm", "registers", "spilled, bytes", "by 16 bytes",
    "moved / needed", "programs at once", "round trips", "share of a copy",
)  # fmt: skip
_TOLD = {
    "TANH", "ADDED", "CENTRED", "RANKS", "OVER", "HEAVY", "FLAT", "along", "down", "READ",
    "READS_PAIRS", "WRITES_PAIRS",
}  # fmt: skip
"""Constants that say which form of a kernel it is."""


@dataclass(frozen=True, slots=True)
class Read:
    """A kernel's code for one width."""

    width: int
    code: Code
    vectors: str
    """Accesses of 16 bytes, of all, on the way that is taken."""
    share: Share | None
    """None where memory does not bound it."""

    @property
    def fault(self) -> str:
        """Say which rule it breaks; "" if none."""
        if self.share:
            return broken(self.share)
        spilled = self.code.spilled_bytes or self.code.spills()
        return f"{self.code.spilled_bytes} bytes of registers are spilled" if spilled else ""


def read(build: Build, width: int, target: int) -> Read:
    """Compile a kernel and count."""
    share = copy_share(build, target) if build.moves else None
    code = share.code if share else machine_code(build, target)
    found = [i for i in code.hot(looped=build.looped) if i.reads_memory or i.writes_memory]
    vectors = f"{sum(i.nbytes == 16 for i in found)} of {len(found)}"
    return Read(width, code, vectors, share)


def groups(module: ModuleType) -> Iterator[tuple[tuple[str, str, int], list[Read]]]:
    """By kernel, type and target, the code of all widths."""
    found: dict[tuple[str, str, int], list[Read]] = {}
    for element, width in product(ELEMENTS, getattr(module, "WIDTHS", WIDTHS)):
        for build, target in product(module.builds(element, width), PROCESSORS):
            if not build.is_for(target):
                continue
            told = [f"{key}={value}" for key, value in build.constants.items() if key in _TOLD]
            file = build.kernel.__module__.partition(".ir.")[2].removeprefix("kernels.")
            title = f"{file} `{build.kernel.__name__}` {', '.join(told)}".strip()
            found.setdefault((title, element, target), []).append(read(build, width, target))
    yield from found.items()


def line(key: tuple[str, str, int], found: Sequence[Read]) -> str:
    """The row of the width that comes off worst."""
    title, element, target = key
    worst = min(found, key=lambda one: one.share.share if one.share else 0.0)
    widths = ", ".join(f"{width:,}" for width in dict.fromkeys(one.width for one in found))
    spilled = max(one.code.spilled_bytes for one in found)
    registers = max(one.code.registers for one in found)
    cells = [title, element, widths, target, registers, spilled, worst.vectors]
    if share := worst.share:
        cells += [f"{share.moved / share.moves:.2f}", share.programs, share.trips]
        cells.append(f"{share.share:.0%} at {worst.width:,}")
    else:
        cells += ["", "", "", "not bound by memory"]
    return f"| {' | '.join(map(str, cells))} |"


def page(lines: Sequence[str], faults: Sequence[str]) -> str:
    """The page of results."""
    return f"""# Kernels as machine code

`python -m benchmarks.kernel_code`, {date.today():%d %B %Y}, {platform.machine()} without a GPU,
Triton {triton.__version__} and the assembler that it brings. **Counted, not measured**: see
`meshwright/testing/copy_share.py` for what is counted and which constants are assumptions.

Rules: no spills; for memory-bound kernels, {WHOLE:.0%} of what has to be moved goes in loads and
stores of 16 bytes; by count of bytes, instructions and round trips {LEAST:.0%} of a copy's
bandwidth can be reached. Counts are of a program, or of a turn of its loop, on the way that it
takes where tensors begin at multiples of 16 bytes; rows of 50,257 begin anywhere. A row has the
most registers and spills of all widths, and the rest of the width that comes off worst.

What breaks a rule: {len(faults)}.

{chr(10).join(f"- {fault}" for fault in faults)}

| {" | ".join(HEAD)} |
|{"---|" * len(HEAD)}
{chr(10).join(lines)}
"""


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    lines, faults = [], []
    for module in compiled():
        for key, found in groups(module):
            lines.append(line(key, found))
            bad = [one for one in found if one.fault]
            faults += [f"{key[0]}, {key[1]}, {x.width:,}, sm_{key[2]}: {x.fault}" for x in bad]
    text = page(lines, faults)
    if out:
        out.write_text(text)
    else:
        print(text)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
