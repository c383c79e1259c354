"""Is the plan that search finds the fastest of those that are really run?

    python -m benchmarks.fastest all -o DIR [--models gpt2,vit] [--sizes 4,8] [--minutes 2]

For each of six models on 4 and on 8 processes of this machine: `profile` measures the machine and
the blocks of the models, `plan` searches and writes all predictions, `race` runs the plans that the
search cannot tell apart and keeps one, `run` runs that one, the others, their best rivals by
prediction and fixed ones of every kind in shuffled order, and those in front again; `report`
compares. Each phase skips what is done.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.accuracy.models import SUBJECTS, Subject
from benchmarks.fastest.plans import entrants, read, write
from benchmarks.fastest.race import after_race
from benchmarks.fastest.report import Contest, report
from benchmarks.fastest.run import read as read_runs
from benchmarks.fastest.run import run_contest
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.profiling.profiling import profile as measure_profile

PRECISION, OPTIMIZER = "fp32", "adamw"
REFINED = 1
"""So often the blocks of the plans that a search finds are measured before it searches again."""


def folders(options: argparse.Namespace) -> Iterator[tuple[Subject, int, Path]]:
    """One for each contest."""
    for model in options.models:
        for size in options.sizes:
            yield SUBJECTS[model], size, options.output / f"{model}-{size}"


def cluster_of(options: argparse.Namespace, size: int) -> Cluster:
    """This machine as so many processes; measured once."""
    path = options.output / f"cluster-{size}.yaml"
    if not path.exists():
        measure_local(size).save(path)
    return Cluster.load(path)


def problem_of(graph: Graph, cluster: Cluster, known: Profile | None = None) -> Problem:
    return make_problem(graph, cluster, precision=PRECISION, optimizer=OPTIMIZER, profile=known)


def profile(options: argparse.Namespace) -> None:
    """Measures what is not known yet."""
    graphs = {model: SUBJECTS[model].graph() for model in options.models}
    for subject, size, folder in folders(options):
        if (folder / "origins.json").exists():
            continue
        graph, cluster = graphs[subject.name], cluster_of(options, size)
        measure_profile(
            graph, cluster, precision=PRECISION, optimizer=OPTIMIZER, minutes=options.minutes,
            path=options.profile, progress=False,
        )  # fmt: skip


def plan(options: argparse.Namespace) -> None:
    """Searches, measures the blocks of what was found, searches again, and writes what is expected
    of every plan."""
    for subject, size, folder in folders(options):
        if (folder / "origins.json").exists():
            continue
        graph, cluster = subject.graph(), cluster_of(options, size)
        known = load_profile(options.profile)
        for _ in range(REFINED):
            found = entrants(problem_of(graph, cluster, known))
            known = measure_profile(
                graph, cluster, precision=PRECISION, optimizer=OPTIMIZER, minutes=options.minutes,
                plans=[entrant.plan for entrant in found], path=options.profile, progress=False,
            )  # fmt: skip
        found = entrants(problem_of(graph, cluster, known))
        write(folder, found)
        print(f"{subject.name} on {size}: {found[0].name}", flush=True)


def race(options: argparse.Namespace) -> None:
    """Puts the plan that is kept first."""
    for subject, size, folder in folders(options):
        done = folder / "raced"
        if not done.exists():
            print(f"{subject.name} on {size}: race", flush=True)
            write(folder, after_race(subject, read(folder), folder))
            done.touch()


def run(options: argparse.Namespace) -> None:
    graphs = {model: SUBJECTS[model].graph() for model in options.models}
    for subject, size, folder in folders(options):
        print(f"{subject.name} on {size}", flush=True)
        run_contest(subject, graphs[subject.name], read(folder), folder)


def write_report(options: argparse.Namespace) -> None:
    """Compares all that has been run."""
    contests = [
        Contest(subject.name, size, tuple(read(folder)), tuple(read_runs(folder / "runs.json")))
        for subject, size, folder in folders(options)
        if (folder / "runs.json").exists()
    ]
    models, sizes = ",".join(options.models), ",".join(map(str, options.sizes))
    command = f"python -m benchmarks.fastest all -o DIR --models {models} --sizes {sizes}"
    text = report(contests, command)
    path = options.report or options.output / "fastest.md"
    path.write_text(text)
    print(text.split("\n## ")[0])


def every_phase(options: argparse.Namespace) -> None:
    for phase in (profile, plan, race, run, write_report):
        phase(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    phases = {"profile": profile, "plan": plan, "race": race, "run": run, "report": write_report,
              "all": every_phase}  # fmt: skip
    parser.add_argument("phase", choices=phases)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SUBJECTS))
    parser.add_argument(
        "--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[4, 8]
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="most for each profile")
    parser.add_argument("--profile", type=Path, help="default: profile.db in the folder")
    parser.add_argument("--report", type=Path, help="default: fastest.md in the folder")
    options = parser.parse_args()
    if unknown := set(options.models) - set(SUBJECTS):
        parser.error(f"no model {sorted(unknown)}; there are {', '.join(SUBJECTS)}")
    options.output.mkdir(parents=True, exist_ok=True)
    options.profile = options.profile or options.output / "profile.db"
    torch.set_num_threads(1)
    phases[options.phase](options)
