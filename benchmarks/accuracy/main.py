"""Predicts plans on this machine, runs them, and reports how wrong the predictions were.

    python -m benchmarks.accuracy all -o DIR [--models gpt2,vit] [--plans 4] [--steps 3]

`profile` measures the machine and the blocks that the plans are made of, `predict` writes a file
for each of those plans whose predictions differ most, `measure` runs each of them in shuffled order
and some of them again. `all` does the three for one model after the other, each in a process of its
own, so that a machine that slowly changes its speed changes it for all plans of a model alike, and
then the `report`, which compares. Goes on where it was stopped.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from benchmarks.accuracy.data import (
    Predicted,
    file_name,
    read_measured,
    read_predicted,
    write,
)
from benchmarks.accuracy.measure import Effort, Trial, base_bytes, run_plan
from benchmarks.accuracy.models import SUBJECTS
from benchmarks.accuracy.plans import ON_FOUR, ON_TWO, POOL, Sketch, apart, plan_of
from benchmarks.accuracy.predict import predicted
from benchmarks.accuracy.report import report
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.profile_store import load_profile
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.profiling.profiling import profile as measure_profile
from meshwright.running.disturbance import pace_s
from meshwright.runtime.job.machine import machine

OF_A_MODEL = ("profile", "predict", "measure")
SIZES = (2, 4)
"""Processes of the two clusters: one per core, and two."""
ORDER_SEED = 0
PRECISION, OPTIMIZER = "fp32", "adamw"


def graphs(models: Sequence[str]) -> dict[str, Graph]:
    """The traced models. Every phase that forks has made them first, so that bases are alike."""
    return {name: SUBJECTS[name].graph() for name in models}


def profile(options: argparse.Namespace) -> None:
    """Measures the clusters, what plans are made of, and the resident base of the processes."""
    for name, graph in graphs(options.models).items():
        if (done := path_of(options, name, "profiled", "txt")).exists():
            continue
        for size in SIZES:
            bytes_there = base_bytes(SUBJECTS[name], size)
            base_path(options, name, size).write_text(str(bytes_there))
        paces = [pace_s()]
        for size in SIZES:
            start = time.perf_counter()
            cluster = measure_local(size)
            cluster.save(path_of(options, name, f"cluster-{size}", "yaml"))
            problem = make_problem(graph, cluster, precision=PRECISION, optimizer=OPTIMIZER)
            measure_profile(
                graph, cluster, precision=PRECISION, optimizer=OPTIMIZER,
                plans=[plan for _, plan in possible(problem, name)],
                path=path_of(options, name, "profile", "db"), progress=False,
                minutes=options.minutes / len(SIZES),
            )  # fmt: skip
            paces.append(pace_s())
            print(f"{name:6} on {size}: {time.perf_counter() - start:4.0f} s", flush=True)
        pace_path(options, name).write_text(str(median(paces)))
        print(f"pace {', '.join(f'{1e3 * pace:.1f}' for pace in paces)} ms", flush=True)
        done.write_text(datetime.now(UTC).isoformat(timespec="seconds"))


def possible(problem: Problem, model: str) -> Iterator[tuple[Sketch, Plan]]:
    """The plans of the pool for the cluster of the problem; says which cannot be made."""
    for sketch in POOL:
        if sketch.num_ranks != problem.cluster.num_devices:
            continue
        try:
            yield sketch, plan_of(problem, sketch)
        except PlanError as error:
            print(f"{model} cannot run as {sketch.name}: {error}")


def path_of(options: argparse.Namespace, model: str, what: str, kind: str) -> Path:
    """A file about a model."""
    path: Path = options.output / "known" / f"{model}-{what}.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def base_path(options: argparse.Namespace, model: str, size: int) -> Path:
    return path_of(options, model, f"base-{size}", "txt")


def pace_path(options: argparse.Namespace, model: str) -> Path:
    """Of the machine while it was profiled."""
    return path_of(options, model, "pace", "txt")


def predict(options: argparse.Namespace) -> None:
    """Writes the plans and what is expected of them."""
    for name, graph in graphs(options.models).items():
        if (done := path_of(options, name, "predicted", "txt")).exists():
            continue
        known = load_profile(path_of(options, name, "profile", "db"))
        found: dict[Sketch, tuple[Predicted, Plan]] = {}
        for size in SIZES:
            cluster = Cluster.load(path_of(options, name, f"cluster-{size}", "yaml"))
            problem = make_problem(
                graph, cluster, precision=PRECISION, optimizer=OPTIMIZER, profile=known
            )
            base = int(base_path(options, name, size).read_text())
            for sketch, plan in possible(problem, name):
                found[sketch] = predicted(name, sketch.name, problem, plan, base), plan
        steps_s = {sketch: prediction.step_s for sketch, (prediction, _) in found.items()}
        for sketch in apart(steps_s, options.plans):
            prediction, plan = found[sketch]
            file = file_name(name, sketch.name)
            (options.output / "plans").mkdir(exist_ok=True)
            plan_io.save(plan, options.output / "plans" / f"{file}.json")
            write(options.output / "predicted" / f"{file}.json", prediction)
            print(f"{name:6} {sketch.name:40} {prediction.step_s:7.3f} s", flush=True)
        done.write_text(datetime.now(UTC).isoformat(timespec="seconds"))


def measure(options: argparse.Namespace) -> None:
    """Runs every predicted plan, then one in so many again: how well does a measurement repeat?"""
    traced = graphs(options.models)
    effort = Effort(warmup=options.warmup, steps=options.steps)
    expected = [p for p in read_predicted(options.output / "predicted") if p.model in traced]
    for turn in range(options.turns):
        random.Random(ORDER_SEED + turn).shuffle(expected)
        for one in expected if turn == 0 else expected[:: options.again]:
            file = file_name(one.model, one.plan)
            path = options.output / "measured" / f"{file}--{turn}.json"
            if path.exists():
                continue
            found = run_plan(
                Trial(
                    subject=SUBJECTS[one.model], name=one.plan, graph=traced[one.model],
                    plan=plan_io.load(options.output / "plans" / f"{file}.json"),
                    folder=options.output / "runs" / f"{file}--{turn}", turn=turn, effort=effort,
                    usual_s=float(pace_path(options, one.model).read_text()),
                )
            )  # fmt: skip
            write(path, found)
            print(
                f"{turn} {one.model:6} {one.plan:40} {one.step_s:7.3f} {found.step_s:7.3f} s "
                f"{one.step_s / found.step_s - 1:+.0%} pace {found.pace:.2f}",
                flush=True,
            )


def write_report(options: argparse.Namespace) -> None:
    """Compares all that lies in the folder."""
    expected = read_predicted(options.output / "predicted")
    runs = read_measured(options.output / "measured")
    here = machine(torch.device("cpu"))
    text = report(
        expected, runs, f"{here}, Gloo", f"{datetime.now(UTC):%d %B %Y}", command(options)
    )
    path = options.report or options.output / "accuracy.md"
    path.write_text(text)
    print(text.split("\n## Every plan")[0])
    print(f"wrote {path}")


def command(options: argparse.Namespace) -> str:
    """How to get these figures again."""
    return f"python -m benchmarks.accuracy all {' '.join(given(options))}"


def given(options: argparse.Namespace) -> list[str]:
    """The options as they are typed."""
    chosen = ["-o", str(options.output), "--models", ",".join(options.models)]
    for name in ("minutes", "plans", "steps", "warmup", "turns", "again"):
        chosen += [f"--{name}", str(getattr(options, name))]
    return chosen + (["--report", str(options.report)] if options.report else [])


def every_phase(options: argparse.Namespace) -> None:
    """One process per phase: what one leaves in memory must not count in the next."""
    for model in options.models:
        for phase in OF_A_MODEL:
            start = time.perf_counter()
            own = argparse.Namespace(**{**vars(options), "models": [model]})
            subprocess.run(
                [sys.executable, "-m", "benchmarks.accuracy", phase, *given(own)], check=True
            )
            print(f"-- {model} {phase}: {time.perf_counter() - start:.0f} s", flush=True)
    write_report(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=(*OF_A_MODEL, "report", "all"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SUBJECTS))
    parser.add_argument("--minutes", type=float, default=4.0, help="most for a profile")
    parser.add_argument("--plans", type=int, default=ON_TWO + ON_FOUR, help="of each model")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="first all plans, then some again")
    parser.add_argument("--again", type=int, default=1, help="later turns run one plan in so many")
    parser.add_argument("--report", type=Path, help="default: accuracy.md in the folder")
    options = parser.parse_args()
    if unknown := set(options.models) - set(SUBJECTS):
        parser.error(f"no model {sorted(unknown)}; there are {', '.join(SUBJECTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    phases = {
        "profile": profile, "predict": predict, "measure": measure,
        "report": write_report, "all": every_phase,
    }  # fmt: skip
    phases[options.phase](options)
