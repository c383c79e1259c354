"""How many decisions an agent needs, cold and warm, on models larger than it was trained on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.auto_map.models import BERT_LARGE, GPT2, T5_LARGE, VGG19, searched
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.searchers.dqn.decisions import Pruning
from meshwright.planner.searchers.dqn.envs import DecisionEnv
from meshwright.planner.searchers.dqn.explore import SHIPPED, warm
from meshwright.planner.searchers.dqn.judge import Judge
from meshwright.planner.searchers.dqn.pipelines import Pipelines
from meshwright.planner.searchers.dqn.training import Settings, Trainer
from meshwright.planner.searchers.dqn.weights import card_of, load_agent

CLOSE = 1.02
STEPS, CHUNK = 3000, 8


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a machine."""

    graph: Callable[[], Graph]
    cluster: Cluster

    def problem(self) -> Problem:
        return make_problem(self.graph(), self.cluster)


CASES = {
    "GPT-2, batch 64, on v100-16:2x4": Case(
        replace(GPT2, batch=64).graph, Cluster.preset("v100-16", num_nodes=2, devices_per_node=4)
    ),
    "BERT-large, batch 256, on a100-40:1x8": Case(
        BERT_LARGE.graph, Cluster.preset("a100-40", num_nodes=1, devices_per_node=8)
    ),
    "T5-large, batch 128, on v100-16:2x8": Case(
        T5_LARGE.graph, Cluster.preset("v100-16", num_nodes=2, devices_per_node=8)
    ),
    "VGG-19, batch 1024, on v100-16:4x8": Case(
        VGG19.graph, Cluster.preset("v100-16", num_nodes=4, devices_per_node=8)
    ),
}


def target_of(case: Case) -> dict[str, Any]:
    """The best plan of either searcher."""
    found = [searched(case.graph, case.cluster, one) for one in ("ilp", "dqn")]
    return min(found, key=lambda row: float(row["step_s"]))


def steps_to(case: Case, best_s: float, seed: int, how: str) -> dict[str, Any]:
    """Decisions of an agent until it is close; all that there are if it does not get there."""
    problem = case.problem()
    judge = Judge(problem)
    decisions = Pipelines(problem, judge, Pruning(), lower_bound(problem))
    settings = Settings(STEPS)
    trainer = Trainer(DecisionEnv(decisions), warm(settings) if how == "warm" else settings, seed)
    if how == "warm":
        load_agent(trainer.agent, card_of(decisions, trainer.agent), SHIPPED)
    while trainer.done < STEPS:
        trainer.learn(CHUNK)
        if judge.best and judge.best[0].fits and judge.best[0].value <= CLOSE * best_s:
            break
    return {"steps": trainer.done, "simulated": len(judge.seen)}
