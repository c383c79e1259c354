"""Trains the pipeline agent that ships with the package, on small models and machines.

python benchmarks/auto_map_train.py -o planner/dqn/agents/pipelines --steps 6000
"""

import argparse
from pathlib import Path

import torch

from benchmarks.auto_map_models import small
from meshwright.ir.cluster import Cluster
from meshwright.planner.across.bound import lower_bound
from meshwright.planner.dqn.decisions import Pruning
from meshwright.planner.dqn.envs import DecisionEnv
from meshwright.planner.dqn.judge import Judge
from meshwright.planner.dqn.pipelines import Pipelines
from meshwright.planner.dqn.several import Several
from meshwright.planner.dqn.training import Settings, Trainer
from meshwright.planner.dqn.weights import card_of, save_agent
from meshwright.planner.problem import make_problem

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
