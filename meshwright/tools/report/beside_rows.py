"""Another plan beside the one that the page is about."""

from dataclasses import asdict
from typing import Any

from meshwright.costmodel.simulate.replay import Replay
from meshwright.tools.diff.figures import figures
from meshwright.tools.report.ranks import rank_rows


def beside_rows(played: Replay, other: Replay) -> dict[str, Any]:
    """Its name and ranks, and all figures of both."""
    plan = other.plan
    stages = len(plan.stages)
    return {
        "name": f"{plan.hash[:12]}: {stages} {'stages' if stages > 1 else 'stage'}, "
        f"{plan.num_microbatches} x {plan.global_batch_size / plan.num_microbatches:g} samples",
        "same_model": plan.model.fingerprint == played.plan.model.fingerprint,
        "model": plan.model.name,
        "ranks": rank_rows(other),
        "figures": [asdict(one) | {"change": one.change} for one in figures(played.plan, plan)],
    }
