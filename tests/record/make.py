"""What today's code plans and predicts, number by number, for refactorings that change nothing.

python -m tests.record.make     writes record.json beside this file

Floats are written so that all bits come back. Notes and explanations are left out: words may get
better. A plan's own times are rounded, so those of the cost model are recorded beside them.
"""

import json
import sys
from dataclasses import asdict, fields, replace
from math import isclose
from pathlib import Path
from typing import Any

from meshwright.costmodel.estimate import estimate_all
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.placed_kernels import put_in
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.search import search_problem
from tests.planner.problem.large import asked, cluster, large
from tests.planner.problems import TINY
from tests.record.cases import CASES, TINIES

RECORD = Path(__file__).parent / "record.json"
REL = 1e-12
"""What fits profiles rounds in its last digits as the processor at hand has it."""
PEERS = "kernels that send"
"""No search: a layout by hand, in whose places kernels work beside their collectives."""
LIMIT_S = 600.0
"""Far more than any of them takes: a search that ran out of time would depend on the machine."""


def names() -> tuple[str, ...]:
    """All cases, those that share a graph one after another."""
    return (*CASES, *(f"tiny {name}" for name in TINIES), PEERS)


def recorded(name: str) -> dict[str, Any]:
    """Search a case and give its numbers as JSON has them."""
    if name == PEERS:
        problem, plan = asked(large(), cluster())
        plan = replace(plan, kernels=put_in(problem, plan))
        exact = estimate_all(problem.graph, problem.cluster, plan, problem.tables).prediction
        places = {f.kernel: f.places for f in plan.kernels}
        return json.loads(json.dumps({"places": places, "exact": asdict(exact)}))  # type: ignore[no-any-return]
    if name in CASES:
        problem, searcher = CASES[name].problem(), CASES[name].searcher
    else:
        problem, searcher = TINY[name.removeprefix("tiny ")](), "ilp"
    plan = search_problem(problem, searcher, time_limit_s=LIMIT_S, progress=False)
    return json.loads(json.dumps(_facts(problem, plan)))  # type: ignore[no-any-return]


def _facts(problem: Problem, plan: Plan) -> dict[str, Any]:
    assert plan.predicted and plan.predicted.detail and plan.evidence
    found = estimate_all(problem.graph, problem.cluster, plan, problem.tables)
    predicted, detail = asdict(plan.predicted), asdict(plan.predicted.detail)
    for kind in detail["kinds"]:
        if not kind["messages"]:  # as files leave it out
            del kind["messages"]
        for name in ("entry_back_bytes", "border_back_bytes", "back_s"):
            if kind[name] is None:
                del kind[name]
        del kind["collectives"]  # tests/costmodel/simulate holds them to the seconds of ranks
    exact = asdict(found.prediction)
    for part in (predicted, exact):
        del part["detail"]
    evidence = asdict(plan.evidence)
    del evidence["alternatives"], evidence["improved"]
    kept = ("kinds", "stages", "ranks", "meeting_s", "overhead_s")
    return {
        "hash": plan.hash,
        "predicted": predicted,
        "exact": exact,
        "models": [
            {f.name: value for f in fields(model)
             if isinstance(value := getattr(model, f.name), float | int)}
            for model in found.models
        ],
        "detail": {key: detail[key] for key in kept},
        "evidence": evidence,
    }  # fmt: skip


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """Where two records differ first, with both values; empty if only rounding differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *(key for key in new if key not in old)):
            if key not in old or key not in new:
                return f"{path}.{key} is only in the {'new' if key in new else 'old'} one"
            if found := first_difference(old[key], new[key], f"{path}.{key}"):
                return found
        return ""
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return f"{path} has {len(new)} items, not {len(old)}"
        pairs = enumerate(zip(old, new, strict=True))
        return next(
            filter(None, (first_difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), ""
        )
    same = type(old) is type(new) and old == new
    if isinstance(old, float) and isinstance(new, float):
        same = isclose(old, new, rel_tol=REL)
    return "" if same else f"{path} is {new!r}, was {old!r}"


def main() -> None:
    """Write the record, or of the cases that are named."""
    old = json.loads(RECORD.read_text()) if len(sys.argv) > 1 else {}
    for name in sys.argv[1:] or names():
        old[name] = recorded(name)
    lines = (f"{json.dumps(n)}:{json.dumps(r, separators=(',', ':'))}" for n, r in old.items())
    RECORD.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
