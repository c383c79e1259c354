"""Trains the pipeline agent that ships with the package, on small models and machines.

python benchmarks/auto_map/train.py -o planner/searchers/dqn/agents/pipelines --steps 6000
"""

import argparse
from pathlib import Path

import torch

from benchmarks.auto_map.models import small
from benchmarks.auto_map.several import Several
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.searchers.dqn.decisions import Pruning
from meshwright.planner.searchers.dqn.envs import DecisionEnv
from meshwright.planner.searchers.dqn.judge import Judge
from meshwright.planner.searchers.dqn.pipelines import Pipelines
from meshwright.planner.searchers.dqn.training import Settings, Trainer
from meshwright.planner.searchers.dqn.weights import card_of, save_agent

MACHINES = (("a100-40", 1, 4), ("v100-16", 2, 2))
CHUNK = 500


def decisions() -> tuple[tuple[str, ...], Several]:
    """All small models on all machines."""
    names, held = [], []
    for name, graph in small().items():
        traced = graph()
        for machine, nodes, devices in MACHINES:
            cluster = Cluster.preset(machine, num_nodes=nodes, devices_per_node=devices)
            problem = make_problem(traced, cluster)
            held.append(Pipelines(problem, Judge(problem), Pruning(), lower_bound(problem)))
            names.append(f"{name} on {cluster.name}")
    return tuple(names), Several(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, several = decisions()
    trainer = Trainer(DecisionEnv(several), Settings(options.steps), options.seed)
    while trainer.done < options.steps:
        trainer.learn(CHUNK)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        card = card_of(
            several.held[0], trainer.agent, trained_on=names, steps=trainer.done, seed=options.seed
        )
        save_agent(trainer.agent, card, options.output)
        print(f"{trainer.done} steps", flush=True)


if __name__ == "__main__":
    main()
