"""Machine code of all kernels for sm_80 and sm_90: accesses, spills, estimated share of a copy.

python -m benchmarks.kernel_code [--out docs/results/kernel_code.md]

Compiles every kernel without a GPU at widths of real models, as launches would have it, and reads
its disassembly. Nothing is measured. Exits with 1 if a memory-bound kernel breaks a rule.
"""

import argparse
import platform
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import ModuleType

from meshwright.ir.kernels import load_all
from meshwright.ir.launch import Build, triton
from meshwright.testing.copy_share import LEAST, PROCESSORS, WHOLE, broken, copy_share
from meshwright.testing.machine_code import WIDTHS, Code, machine_code

ELEMENTS = ("bf16", "fp32")
HEAD = (
    "| kernel | of | width | sm | registers | spilled, bytes | shared, bytes | by 16 bytes | "
    "moved / needed, bytes | programs at once | round trips | share of a copy |"
)


def _accesses(code: Code, *, looped: bool) -> str:
    """How many loads and stores of 16 bytes there are, of all, on the way that is taken."""
    found = [i for i in code.hot(looped=looped) if i.reads_memory or i.writes_memory]
    return f"{sum(i.nbytes == 16 for i in found)} of {len(found)}"


def rows(module: ModuleType, elements: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """A line of the table for each kernel, width and target, and the rule that it breaks."""
    name = module.__name__.rpartition(".")[2]
    for width in getattr(module, "WIDTHS", WIDTHS):
        for element in elements:
            for build in module.builds(element, width):
                for target in PROCESSORS:
                    yield _row(name, element, width, build, target)


def _row(name: str, element: str, width: int, build: Build, target: int) -> tuple[str, str]:
    kernel = f"| {name} `{build.kernel.__name__}`{_told(build)} | {element} | {width:,} | {target} "
    if not build.moves:
        code = machine_code(build, target)
        cells = (
            f"| {code.registers} | {code.spilled_bytes} | {code.shared_bytes:,} | "
            f"{_accesses(code, looped=build.looped)} | | | | bound by products |"
        )
        return kernel + cells, ""
    share = copy_share(build, target)
    code = share.code
    cells = (
        f"| {code.registers} | {code.spilled_bytes} | {code.shared_bytes:,} | "
        f"{_accesses(code, looped=build.looped)} | {share.moved:,.0f} / {share.moves:,.0f} | "
        f"{share.programs} | {share.trips} | {share.share:.0%} |"
    )
    return kernel + cells, broken(share)


def _told(build: Build) -> str:
    """Constants that say which form of the kernel it is."""
    kept = {"TANH", "ADDED", "CENTRED", "RANKS", "OVER", "HEAVY", "along", "down"}
    found = [f"{key}={value}" for key, value in build.constants.items() if key in kept]
    return f" ({', '.join(found)})" if found else ""


def page(lines: list[str], faults: list[str]) -> str:
    """The page of results."""
    return f"""# Kernels as machine code

`python -m benchmarks.kernel_code`, {date.today():%d %B %Y}, {platform.machine()} without a GPU,
Triton {triton.__version__} and the assembler that it brings. **Counted, not measured**: see
`meshwright/testing/copy_share.py` for what is counted and which constants are assumptions.

Rules for memory-bound kernels: no spills, {WHOLE:.0%} of what has to be moved goes in loads and
stores of 16 bytes, and by count of bytes, of instructions and of round trips {LEAST:.0%} of a
copy's bandwidth can be reached. Counts are of a program, or of a turn of its loop, on the way that
it takes where tensors begin at multiples of 16 bytes. What breaks a rule: {len(faults)}.

{chr(10).join(f"- {fault}" for fault in faults) or "Nothing."}

{HEAD}
|{"---|" * HEAD.count(" |")}
{chr(10).join(lines)}
"""


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    lines, faults = [], []
    for module in load_all():
        if hasattr(module, "builds"):
            for line, fault in rows(module, ELEMENTS):
                lines.append(line)
                faults += [f"{line.split('|')[1:5]}: {fault}"] if fault else []
    text = page(list(dict.fromkeys(lines)), faults)
    if out:
        out.write_text(text)
    else:
        print(text)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
