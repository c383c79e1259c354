"""The DQN searcher: against brute force, against the ILP on full-size models, and warm started.

python -m benchmarks.auto_map exact [--instances 0 1 2 ...] [--seeds 20]
python -m benchmarks.auto_map models [--profiles FOLDER] [--only GPT-2 ...] [--nodes 1 2 4 8]
python -m benchmarks.auto_map warm [--seeds 5]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.auto_map_exact import SEEDS, brute_force, instance, learned
from benchmarks.auto_map_models import GPT2, full_size
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.planner.across.bound import lower_bound
from meshwright.planner.dqn.decisions import Pruning
from meshwright.planner.dqn.envs import DecisionEnv
from meshwright.planner.dqn.explore import SHIPPED, warm
from meshwright.planner.dqn.judge import Judge
from meshwright.planner.dqn.operators import Operators
from meshwright.planner.dqn.pipelines import Pipelines
from meshwright.planner.dqn.training import Settings, Trainer
from meshwright.planner.dqn.weights import card_of, load_agent
from meshwright.planner.problem import Problem, make_problem
from meshwright.planner.search import search_problem
from meshwright.planner.why import name_of

EQUAL = 1e-9
PRUNINGS = {
    "all": Pruning(),
    "no linkage": Pruning(linkage=False),
    "no memory limit": Pruning(memory=False),
}
LIMIT_S = 3600.0
CLOSE = 1.02
STEPS, CHUNK = 3000, 16


def exact(instances: list[int], seeds: int) -> None:
    """Brute force, and agents of several seeds."""
    print("| instance | groups | partitions | all of them, CPU s | found | states | simulated |")
    print("|---|---|---|---|---|---|---|")
    for number in instances:
        asked = instance(number)
        start = time.process_time()
        whole = Operators(asked.problem, asked.model, Judge(asked.problem), Pruning())
        best, partitions = brute_force(whole)
        took_s = time.process_time() - start
        found = [learned(asked, Pruning(), seed) for seed in range(seeds)]
        hits = sum(one.value <= best * (1 + EQUAL) for one in found)
        print(
            f"| {number} | {len(whole.linkage.groups)} | {partitions} | {took_s:.1f} | "
            f"{hits} of {seeds} | {median(one.states for one in found):.0f} | "
            f"{median(one.simulated for one in found):.0f} |", flush=True,
        )  # fmt: skip


def prunings(instances: list[int]) -> None:
    """The same agent with parts of the pruning turned off."""
    print("| instance | pruning | decisions | states | simulated | CPU s | step above the best |")
    print("|---|---|---|---|---|---|---|")
    for number in instances:
        asked = instance(number)
        found = {name: learned(asked, pruning, 0) for name, pruning in PRUNINGS.items()}
        least = min(one.value for one in found.values())
        for name, one in found.items():
            print(
                f"| {number} | {name} | {one.groups} | {one.states} | {one.simulated} | "
                f"{one.cpu_s:.1f} | {one.value / least - 1:.2%} |", flush=True,
            )  # fmt: skip


def models(every: dict[str, Callable[[], Graph]], nodes: list[int], machine: str) -> None:
    """The best plan of both searchers."""
    print(
        "| model | devices | ILP step s | ILP CPU s | DQN step s | DQN CPU s | DQN / ILP | plans |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, graph in every.items():
        traced = graph()
        for count in nodes:
            cluster = Cluster.preset(machine, num_nodes=count, devices_per_node=8)
            rows = [_searched(make_problem(traced, cluster), one) for one in ("ilp", "dqn")]
            (ilp_s, ilp_took, ilp), (dqn_s, dqn_took, dqn) = rows
            print(
                f"| {name} | {cluster.num_devices} | {ilp_s:.4g} | {ilp_took:.0f} | {dqn_s:.4g} | "
                f"{dqn_took:.0f} | {dqn_s / ilp_s:.4f} | {ilp}; {dqn} |", flush=True,
            )  # fmt: skip


def _searched(problem: Problem, searcher: str) -> tuple[float, float, str]:
    start = time.process_time()
    plan = search_problem(problem, searcher, time_limit_s=LIMIT_S)
    assert plan.predicted
    return plan.predicted.step_s, time.process_time() - start, name_of(plan)


def warm_starts(seeds: int) -> None:
    """Decisions until a plan within 2 % of the best known was simulated, cold and warm."""
    graph = replace(GPT2, batch=64).graph()
    cluster = Cluster.preset("v100-16", num_nodes=2, devices_per_node=4)
    target = CLOSE * _searched(make_problem(graph, cluster), "ilp")[0]
    print("| seed | cold | warm |")
    print("|---|---|---|")
    rows = []
    for seed in range(seeds):
        rows.append(
            [steps_to(make_problem(graph, cluster), target, seed, w) for w in (False, True)]
        )
        print(f"| {seed} | {rows[-1][0]} | {rows[-1][1]} |", flush=True)
    cold, warmed = (median(row[i] for row in rows) for i in (0, 1))
    print(f"median {cold:.0f} and {warmed:.0f}: {cold / warmed:.1f}x")


def steps_to(problem: Problem, target: float, seed: int, is_warm: bool) -> int:
    """Decisions of an agent; all that there are if it does not get there."""
    judge = Judge(problem)
    decisions = Pipelines(problem, judge, Pruning(), lower_bound(problem))
    settings = Settings(STEPS)
    trainer = Trainer(DecisionEnv(decisions), warm(settings) if is_warm else settings, seed)
    if is_warm:
        load_agent(trainer.agent, card_of(decisions, trainer.agent), SHIPPED)
    while trainer.done < STEPS:
        trainer.learn(CHUNK)
        best = judge.best()
        if best and best[0].fits and best[0].value <= target:
            break
    return trainer.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("exact", "prunings", "models", "warm"))
    parser.add_argument("--instances", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--machine", default="v100-16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    match options.part:
        case "exact":
            exact(options.instances, options.seeds)
        case "prunings":
            prunings(options.instances)
        case "models":
            every = full_size(options.profiles)
            chosen = {n: g for n, g in every.items() if not options.only or n in options.only}
            models(chosen, options.nodes, options.machine)
        case "warm":
            warm_starts(options.seeds)


if __name__ == "__main__":
    main()
