"""The DQN searcher: against brute force, against the ILP on full-size models, and warm started.

python -m benchmarks.auto_map exact [--instances 0 1 2 ...] [--seeds 20]
python -m benchmarks.auto_map prunings [--instances 0 1 2 ...]
python -m benchmarks.auto_map models [--profiles FOLDER] [--only GPT-2 ...] [--nodes 1 2 4 8]
python -m benchmarks.auto_map layouts [--instances 0 1 2 ...] [--memory BYTES]
python -m benchmarks.auto_map warm [--seeds 3] [--only GPT-2 ...]

With -o FILE each result is kept as it comes, and a run that was cut off goes on where it was.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import torch

from benchmarks.auto_map.beats import beaten
from benchmarks.auto_map.exact import SEEDS, instance, learned, operators, reference
from benchmarks.auto_map.models import full_size, searched
from benchmarks.auto_map.prunings import HEADS as PRUNED
from benchmarks.auto_map.prunings import prunings
from benchmarks.auto_map.rows import Row, Rows, table
from benchmarks.auto_map.warm import CASES, steps_to, target_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.searchers.dqn.decisions import Pruning

EQUAL = 1e-9
COUNTED = ("states", "simulated", "cpu_s")


def exact(rows: Rows, instances: Sequence[int], seeds: int) -> Iterator[Sequence[object]]:
    """Brute force, and agents of several seeds."""
    hits = tried = 0
    for number in instances:
        agent = cache(lambda number=number: operators(instance(number), Pruning()))
        best = rows.once(("exact", number), lambda agent=agent: reference(agent()))
        found = [
            rows.once(
                ("exact", number, seed),
                lambda agent=agent, seed=seed: learned(agent().afresh(), seed),
            )
            for seed in range(seeds)
        ]
        good = sum(one["value"] <= best["value"] * (1 + EQUAL) for one in found)
        hits, tried = hits + good, tried + seeds
        yield (
            number, best["groups"], best["partitions"], f"{best['cpu_s']:.1f}",
            f"{best['priced'] / best['value'] - 1:+.2%}", f"{good} of {seeds}",
            *(f"{median(one[key] for one in found):.3g}" for key in COUNTED),
        )  # fmt: skip
    yield "all", "", "", "", "", f"{hits} of {tried}", "", "", ""


def models(
    rows: Rows,
    profiles: Path | None,
    only: Sequence[str] | None,
    nodes: Sequence[int],
    machine: str,
) -> Iterator[Sequence[object]]:
    """The best plan of both searchers."""
    for name, graph in full_size(profiles).items():
        if only and name not in only:
            continue
        traced = cache(graph)
        for count in nodes:
            cluster = Cluster.preset(machine, num_nodes=count, devices_per_node=8)
            ilp, dqn = (
                rows.once(("models", name, cluster.name, one), searched, traced, cluster, one)
                for one in ("ilp", "dqn")
            )
            yield (
                name, cluster.name, *_figures(ilp), *_figures(dqn),
                f"{dqn['step_s'] / ilp['step_s'] - 1:+.2%}", f"{ilp['name']}; {dqn['name']}",
            )  # fmt: skip


def _figures(row: Row) -> tuple[str, ...]:
    return (
        f"{row['step_s']:.5g}", f"{row['cpu_s']:.0f}", f"{row['wall_s']:.0f}", str(row["plans"])
    )  # fmt: skip


def layouts(rows: Rows, instances: Sequence[int], memory: int) -> Iterator[Sequence[object]]:
    """Layouts that the simulator likes better than those that the ILP has priced."""
    for number in instances:
        asked = replace(instance(number), memory_bytes=memory)
        row = rows.once(("layouts", number, memory), beaten, asked)
        yield (
            number, memory, *(_ms(row[key]) for key in ("priced_s", "agent_s", "ilp_s", "dqn_s")),
            f"{row['dqn_s'] / row['ilp_s'] - 1:+.2%}", f"{row['ilp']}; {row['dqn']}",
        )  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "none fits" if seconds is None else f"{1e3 * seconds:.5g}"


def warm(rows: Rows, seeds: int, only: Sequence[str] | None) -> Iterator[Sequence[object]]:
    """Decisions until a plan within 2 % of the best known was simulated, cold and warm."""
    ratios = []
    for name, case in CASES.items():
        if only and not name.startswith(tuple(only)):
            continue
        best = rows.once(("warm", name, "target"), target_of, case)
        found = [
            [rows.once(("warm", name, seed, w), steps_to, case, best["step_s"], seed, w)
             for seed in range(seeds)]
            for w in ("warm", "cold")
        ]  # fmt: skip
        warmed, cold = ([row["steps"] for row in side] for side in found)
        ratios.append(median(cold) / median(warmed))
        yield name, f"{best['step_s']:.4g}", cold, warmed, f"{ratios[-1]:.1f}x"
    yield "median", "", "", "", f"{median(ratios):.1f}x"


HEADS = {
    "exact": ("instance", "groups", "partitions", "all of them, CPU s", "ILP's layouts",
              "found", "states",
              "simulated", "CPU s"),
    "prunings": PRUNED,
    "models": ("model", "machine", "ILP step s", "CPU s", "wall s", "plans", "DQN step s", "CPU s",
               "wall s", "plans", "DQN over ILP", "plans"),
    "layouts": ("instance", "memory, bytes", "ILP's layouts, ms", "agent's, ms", "ILP plan, ms",
                "DQN plan, ms", "DQN over ILP", "plans"),
    "warm": ("case", "best known, s", "steps cold", "steps warm", "cold over warm"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=tuple(HEADS))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--instances", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--machine", default="v100-16")
    parser.add_argument("--memory", type=int, default=10**9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = Rows(options.output)
    asked = {
        "exact": lambda: exact(rows, options.instances, options.seeds),
        "prunings": lambda: prunings(rows, options.instances),
        "models": lambda: models(
            rows, options.profiles, options.only, options.nodes, options.machine
        ),
        "layouts": lambda: layouts(rows, options.instances, options.memory),
        "warm": lambda: warm(rows, options.seeds, options.only),
    }
    table(HEADS[options.part], asked[options.part]())
