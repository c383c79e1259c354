"""Measures on a GPU, in under ten minutes, what the docs claim of GPUs; or rehearses that on a CPU.

python -m benchmarks.gpu --out RUN        on the day: all steps, within 565 s; `make gpu`
python -m benchmarks.gpu --rehearse       all steps at tiny sizes, on a CPU
python -m benchmarks.gpu --prepare        before the day: searches the plans that steps run
python -m benchmarks.gpu --needs          before the day: packages to carry, by name and version
python -m benchmarks.gpu --page RUN       after it: writes docs/results/gpu.md
python -m benchmarks.gpu --fold RUN       after it: keeps the profile's curves beside the preset
"""

import argparse
import atexit
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu import seen
from benchmarks.gpu.page import page
from benchmarks.gpu.rehearsal import rehearse
from benchmarks.gpu.results import LEFT, MODULES, PROFILE, DayRun, Result, load
from benchmarks.gpu.runner import find_devices, run_steps, warm
from benchmarks.gpu.step import BUDGET_S, Place, Step, load_steps, recipes_of
from meshwright.ir.errors import MeshwrightError, PlanError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLANS = ROOT / "device-plans"
"""Prepared plans, which git ignores."""
PAGE = ROOT / "docs" / "results" / "gpu.md"
PRESETS = ("h100-sxm", "h200")
"""Devices that plans are prepared for."""
NOTHING = "-"
"""In the place of a run: there is none."""


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line; errors are a line on stderr."""
    # Whoever asks for a GPU while modules are loaded must not begin to use CUDA: forks could not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    _reach_wheels()
    given = _parser().parse_args(arguments)
    try:
        if given.page:
            write_page(given.page, given.page_to)
        elif given.fold:
            fold(given.fold, given.fold_to)
        elif given.prepare:
            prepare_plans(given.plans, given.presets, given.there, tiny=given.rehearse)
        elif given.needs:
            print_needs(given.there, given.out if given.seen else None)
        else:
            run_day(given)
    except MeshwrightError as error:
        raise SystemExit(f"error: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu"), help="folder of the run")
    add("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    add("--only", nargs="+", metavar="STEP", help="these steps alone")
    add("--budget", type=float, default=BUDGET_S, help="seconds for all")
    add("--anew", action="store_true", help="a Python of its own for each step")
    add("--plans", type=Path, default=PLANS, help="folder of prepared plans")
    add("--prepare", action="store_true", help="search the plans of all steps")
    add("--presets", nargs="+", default=PRESETS, help="devices to prepare plans for")
    add("--needs", action="store_true", help="what to carry; rehearses, unless --seen")
    add("--seen", action="store_true", help="take the modules that the rehearsal in --out noted")
    add("--there", type=Path, default=HERE / "there.txt", help="packages of the machine")
    add("--page", metavar="RUN", help=f"a run's page; {NOTHING}: of the claims alone")
    add("--page-to", type=Path, default=PAGE, help="where to write it")
    add("--fold", type=Path, metavar="RUN", help="keep a run's curves as evidence for its preset")
    add("--fold-to", type=Path, help="where to keep them; else among the presets")
    return parser


def _reach_wheels() -> None:
    """What was carried is found first, here and by the Pythons that steps start."""
    carried = ROOT / seen.WHEELS
    if carried.is_dir() and sys.version_info[:2] == tuple(map(int, seen.PYTHON.split("."))):
        folder = tempfile.mkdtemp(prefix="meshwright-wheels-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        seen.unpack(carried, Path(folder))
        sys.path.insert(0, folder)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, str(ROOT), before)))


def run_day(given: argparse.Namespace) -> None:
    """Runs the steps, or rehearses them; exits with 1 if a rehearsal finds a fault."""
    begun = time.monotonic()
    steps = chosen(load_steps(), given.only)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in () if given.only else LEFT:
        (given.out / name).unlink(missing_ok=True)  # of an earlier run, which steps would read
    with tempfile.TemporaryDirectory() as folder:
        if given.rehearse:
            seen.watch(Path(folder))
        warm(list(dict.fromkeys(name for step in steps for name in step.imports)))
        devices = find_devices()
        if not devices.gpus and not given.rehearse:
            raise PlanError("this machine has no GPU: --rehearse tries the steps on its CPU")
        if given.anew:
            devices = replace(devices, forks=False)
        device = "cpu" if given.rehearse else "cuda"
        place = Place(out=given.out.resolve(), device=device, rehearsal=given.rehearse,
                      plans=given.plans.resolve(), until=begun)  # fmt: skip
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run = DayRun(begun=now, device=device, rehearsal=given.rehearse, budget_s=given.budget)
        print(f"{len(steps)} steps in {given.budget:.0f} s on {device}, results in {given.out}")
        if given.rehearse:
            run = rehearse(steps, place, run, devices, tell)
        else:
            run = run_steps(steps, place, run, devices, begun, tell)
        if given.rehearse:
            names = sorted(seen.gather(Path(folder)))
            (given.out / MODULES).write_text("\n".join(names) + "\n", encoding="utf-8")
    print(f"all in {time.monotonic() - begun:.0f} s")
    if given.rehearse and not all(result.sound for result in run.results):
        raise SystemExit(1)


def chosen(steps: tuple[Step, ...], names: list[str] | None) -> tuple[Step, ...]:
    """The steps of these names; PlanError lists them where one is none."""
    known = [step.name for step in steps]
    if odd := [name for name in names or () if name not in known]:
        raise PlanError(f"no step {odd[0]!r}; the steps are {', '.join(known)}")
    return tuple(step for step in steps if names is None or step.name in names)


def tell(result: Result) -> None:
    """Prints a row of the table of progress."""
    of = ""
    if result.limit_s:
        of = f"{result.seconds:6.1f} of {result.limit_s:3.0f} s, {result.cpu_s:5.1f} s computed"
    row = f"{result.step:15s} {result.status:13s} {of:32s} {len(result.facts):3d} facts"
    errors = f"; {len(result.errors)} rows failed" if result.errors else ""
    print(f"{row}  {result.why}{errors}", flush=True)


def prepare_plans(folder: Path, presets: list[str], there: Path, *, tiny: bool) -> None:
    """Searches the plans of all steps for some devices, or tiny ones for this machine's CPU."""
    from importlib import metadata

    here = {name: metadata.version(name) for name in ("torch", "transformers")}
    if other := seen.other_tracers(seen.versions(there.read_text(encoding="utf-8")), here):
        print(
            f"{', '.join(other)}: a model that these trace otherwise is searched again on the day, "
            "in the time of its step; prepare with a Python that has the machine's versions"
        )
    from benchmarks.gpu.planned import prepare
    from meshwright.ir.cluster.cluster import Cluster

    clusters = [Cluster.preset(name, devices_per_node=1) for name in presets]
    for path, why in prepare(
        recipes_of(load_steps()), [Cluster.local(1)] if tiny else clusters, folder, tiny
    ):
        print(f"{path.relative_to(folder)}  {why or 'written'}", flush=True)


def print_needs(there: Path, rehearsed: Path | None) -> None:
    """Prints what the steps import and the machine lacks, and how to bring it along."""
    with tempfile.TemporaryDirectory() as folder:
        if rehearsed is None:
            rehearsed = Path(folder)
            run_day(_parser().parse_args(["--rehearse", "--out", str(rehearsed)]))
        noted = rehearsed / MODULES
        if not noted.is_file():
            raise PlanError(f"there is no {noted}: rehearse into this folder, or leave --seen out")
        modules = noted.read_text(encoding="utf-8").split()
    pinned = seen.versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    asked = seen.wanted((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheels = seen.lacking(modules, seen.versions(there.read_text(encoding="utf-8")), pinned, asked)
    print("\n".join(wheels))
    print(f"\n{seen.command(wheels)}")


def write_page(run: str, path: Path) -> None:
    """Writes the page of a run; a rehearsal's only elsewhere than among the docs."""
    found = None if run == NOTHING else load(Path(run))
    if found and found.rehearsal and path == PAGE:
        raise PlanError(f"{run} is a rehearsal: it measured nothing; give another --page-to")
    path.write_text(page(found, load_steps()), encoding="utf-8")
    print(f"wrote {path}")


def fold(run: Path, folder: Path | None = None) -> None:
    """Keeps a run's curves in the folder of evidence, and says how far the preset is from them."""
    from benchmarks.gpu.evidence import curve_rows, curves_of
    from meshwright.ir.presets import DEVICES
    from meshwright.ir.profile.evidence import FOLDER, save_curves
    from meshwright.ir.profile.profile_store import load_profile

    found = load(run)
    if found.rehearsal:
        raise PlanError(f"{run} is a rehearsal: it measured nothing")
    preset = str(found.facts("environment").get("preset", ""))
    profile = load_profile(run / PROFILE)
    curves = curves_of(profile, preset, found.begun[:10])
    path = save_curves(curves, folder or FOLDER)
    for row in curve_rows(profile, DEVICES[preset]):
        print(
            f"{row.curve:16s} preset over measured {row.preset_over_measured:5.2f}, at worst "
            f"{row.worst:5.2f}, of {row.count} ops; the preset says +-{row.band:.0%}"
        )
    print(f"wrote {path}: compare, change the preset by hand, name the file in its `evidence`")
