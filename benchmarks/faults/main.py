"""What becomes of `meshwright run --elastic` under each fault: three ranks on CPUs, over Gloo, or
two "nodes" of two ranks, which are two supervisors on this machine.

`python -m benchmarks.faults [WORDS]` has every fault whose name has one of the words, or all, and
prints a table: how each was detected and in how many seconds, the cause that was named, seconds
until it trained again, and whether its losses are those of a run without a fault.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.faults.acts import BASES, FAULTS
from benchmarks.faults.kills import killed_at_random
from benchmarks.faults.runs import Outcome, outcome, plan_file
from benchmarks.faults.target import STEPS_A_KILL

_HEADS = ("fault", "ranks", "detected, s", "trains again, s", "exit", "cause named", "right")


def main() -> int:
    """0 if every fault ended as it should."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--kills", type=int, default=0, help="of random ranks, in one long run")
    asked = parser.parse_args()
    words = asked.words
    if asked.kills:
        with tempfile.TemporaryDirectory() as folder:
            wrong, kills, starts = killed_at_random(asked.kills, plan_file(Path(folder)))
        right = f"losses of all {STEPS_A_KILL * asked.kills} steps are those of a run without"
        if not wrong and kills < asked.kills:
            wrong = f"the run was over after {kills} kills of {asked.kills}"
        print(f"{kills} kills, {starts} starts: {wrong or right}")
        return int(bool(wrong))
    chosen = [n for n in FAULTS if not words or any(w in n for w in words)]
    without = {BASES[FAULTS[name].wide] for name in chosen}
    names = [name for name in FAULTS if name in without or name in chosen]
    bad = 0
    print("| " + " | ".join(_HEADS) + " |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plans = {
            (nodes, wide): plan_file(Path(folder), nodes=nodes, wide=wide)
            for nodes, wide in {(FAULTS[name].nodes, FAULTS[name].wide) for name in names}
        }
        wanted: dict[bool, Mapping[int, float]] = {}
        for name in names:
            fault = FAULTS[name]
            found = outcome(name, plans[fault.nodes, fault.wide])
            wrong = found.wrong(wanted.setdefault(fault.wide, found.losses))
            bad += bool(wrong)
            print(_row(found, wrong), flush=True)
    return int(bad > 0)


def _row(found: Outcome, wrong: str) -> str:
    seconds = [f"{s:.1f}" if s is not None else "" for s in (found.detected_s, found.again_s)]
    ranks = " → ".join(map(str, found.ranks))
    causes = "; ".join(found.causes)
    if FAULTS[found.name].relieved:
        causes = "steps take " + " → ".join(f"{each_s:.3f}" for each_s in found.step_s) + " s"
    cells = (found.name, ranks, *seconds, found.code, causes, wrong or "yes")
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"
