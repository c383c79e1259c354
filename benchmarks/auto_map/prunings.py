"""The same agents with parts of the pruning turned off."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.auto_map.exact import Instance, Learned, instance, learned, operators
from benchmarks.auto_map.models import MIXTRAL
from benchmarks.auto_map.rows import Rows
from benchmarks.auto_map.warm import CASES, Case
from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.searchers.dqn.decisions import Pruning
from meshwright.planner.searchers.dqn.envs import DecisionEnv
from meshwright.planner.searchers.dqn.judge import Judge
from meshwright.planner.searchers.dqn.pipelines import Pipelines
from meshwright.planner.searchers.dqn.training import Settings, Trainer

OPERATORS = {
    "all": Pruning(),
    "no linkage": Pruning(linkage=False),
    "no memory limit": Pruning(memory=False),
}
PIPELINES = {
    "all": Pruning(),
    "no radius": Pruning(radius=None),
    "no memory limit": Pruning(memory=False),
}
TIGHT = 0.6
"""Of what whole parameters with their state take: the memory where its limit is tried."""
DECISIONS = 500
"""Of each pipeline agent."""
MIXTRAL_ON_H200 = Case(MIXTRAL.graph, Cluster.preset("h200", num_nodes=2, devices_per_node=8))
CHOSEN = {
    **{name: case for name, case in CASES.items() if name.startswith(("GPT-2", "BERT-large"))},
    "Mixtral, batch 128, on h200:2x8": MIXTRAL_ON_H200,
}
"""The last has more parameters than most groups of its devices hold."""
HEADS = ("case", "pruning", "decisions", "states", "simulated", "of these too large", "CPU s",
         "step above the best")  # fmt: skip


def prunings(rows: Rows, instances: Sequence[int]) -> Iterator[Sequence[object]]:
    """Operators of networks with ample memory and with little; then pipelines."""
    for number in instances:
        for memory, asked in (
            ("ample", instance(number)), ("little", instance(number).with_memory(TIGHT))
        ):  # fmt: skip
            found = {
                name: rows.once(("prunings", number, memory, name), _operators, asked, pruning)
                for name, pruning in OPERATORS.items()
                if memory == "little" or pruning.memory
            }
            yield from _compared(f"{number}, {memory} memory", found)
    for name, case in CHOSEN.items():
        yield from _compared(name, {
            off: rows.once(("prunings", name, off), _pipelines, case, pruning)
            for off, pruning in PIPELINES.items()
        })  # fmt: skip


def _compared(case: str, found: dict[str, Any]) -> Iterator[Sequence[object]]:
    least = min(one["value"] for one in found.values())
    for name, one in found.items():
        yield (
            case, name, one["groups"], one["states"], one["simulated"], one["too_large"],
            f"{one['cpu_s']:.1f}", f"{one['value'] / least - 1:.2%}",
        )  # fmt: skip


def _operators(asked: Instance, pruning: Pruning) -> Learned:
    """With the time that linkage and prices take."""
    start = time.process_time()
    found = learned(operators(asked, pruning), 0)
    return replace(found, cpu_s=time.process_time() - start)


def _pipelines(case: Case, pruning: Pruning) -> dict[str, Any]:
    """A cold agent after so many decisions."""
    problem = case.problem()
    bound_s, judge = lower_bound(problem), Judge(problem)
    start = time.process_time()
    decisions = Pipelines(problem, judge, pruning, bound_s)
    trainer = Trainer(DecisionEnv(decisions), Settings(DECISIONS), 0)
    trainer.learn(DECISIONS)
    assert judge.best
    return {
        "value": judge.best[0].value, "groups": DECISIONS, "states": decisions.states,
        "simulated": len(judge.seen), "cpu_s": time.process_time() - start,
        "too_large": sum(not verdict.fits for verdict in judge.seen.values()),
    }  # fmt: skip
