"""Measures on a GPU, in under ten minutes, what the docs claim of GPUs; or rehearses that on a CPU.

python -m benchmarks.gpu --out RUN              all steps, within 570 s; `make gpu`
python -m benchmarks.gpu --rehearse             all steps at tiny sizes, on the CPU
"""

import argparse
import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.results import DayRun, Result
from benchmarks.gpu.runner import find_devices, run_steps, warm
from benchmarks.gpu.step import BUDGET_S, Place, Step, load_steps
from meshwright.ir.errors import PlanError

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""Whoever asks whether there is a GPU, while modules are loaded, does not begin to use CUDA."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLANS = HERE / "plans"


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the run")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps alone")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all")
    parser.add_argument("--anew", action="store_true", help="a Python of its own for each step")
    given = parser.parse_args(arguments)
    steps = chosen(load_steps(), given.only)
    warm(list(dict.fromkeys(name for step in steps for name in step.imports)))
    devices = find_devices()
    if given.anew:
        devices = replace(devices, forks=False)
    if not devices.gpus and not given.rehearse:
        raise SystemExit("this machine has no GPU: run with --rehearse to try the steps on its CPU")
    given.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if given.rehearse else "cuda"
    place = Place(out=given.out.resolve(), device=device, rehearsal=given.rehearse, plans=PLANS,
                  until=begun)  # fmt: skip
    now = datetime.now(UTC).isoformat(timespec="seconds")
    run = DayRun(begun=now, device=device, rehearsal=given.rehearse, budget_s=given.budget)
    print(f"{len(steps)} steps in {given.budget:.0f} s on {device}, results in {given.out}")
    run = run_steps(steps, place, run, devices, begun, tell)
    print(f"all in {time.monotonic() - begun:.0f} s")
    if given.rehearse and not all(r.sound for r in run.results):
        raise SystemExit(1)


def chosen(steps: tuple[Step, ...], names: list[str] | None) -> tuple[Step, ...]:
    """The steps of these names; PlanError lists them where one is none."""
    known = [step.name for step in steps]
    if odd := [name for name in names or () if name not in known]:
        raise PlanError(f"no step {odd[0]!r}; the steps are {', '.join(known)}")
    return tuple(step for step in steps if names is None or step.name in names)


def tell(result: Result) -> None:
    """Prints a row of the table of progress."""
    of = f"{result.seconds:6.1f} of {result.limit_s:3.0f} s" if result.limit_s else " " * 15
    print(f"{result.step:14s} {result.status:14s} {of}  {len(result.facts):3d} facts  {result.why}",
          flush=True)  # fmt: skip
