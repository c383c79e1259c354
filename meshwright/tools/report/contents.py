"""All that the page shows, as plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshwright.costmodel.explain.compare import check_run
from meshwright.costmodel.explain.utilisation import Utilisation
from meshwright.costmodel.simulate.replay import replay
from meshwright.ir.plan.beside import bounded
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Evidence
from meshwright.ir.plan.tokens import tokens_per_sample
from meshwright.ir.profile.measured import Measured
from meshwright.ir.profile.outliers import outliers
from meshwright.ir.profile.profile import Profile
from meshwright.ir.styles import style
from meshwright.tools.report.beside_rows import beside_rows
from meshwright.tools.report.measured_rows import measured_rows
from meshwright.tools.report.memory_rows import memory_groups
from meshwright.tools.report.model_tree import model_tree
from meshwright.tools.report.ranks import rank_rows
from meshwright.tools.report.timeline_rows import timeline
from meshwright.tools.report.traffic_rows import message_rows, traffic_rows


def contents(
    plan: Plan, runs: Sequence[Measured] = (), beside: Plan | None = None,
    profile: Profile | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Of a plan with a prediction; of a run of it, of a plan to set beside it and of the profile
    that it was made with, if they are given."""
    if runs:
        check_run(plan, runs)
    played, other = replay(plan), replay(beside) if beside else None
    return {
        "plan": _headline(plan),
        "ranks": rank_rows(played),
        "timeline": timeline(played, runs, other),
        "memory": memory_groups(played),
        "traffic": traffic_rows(plan),
        "messages": message_rows(plan),
        "model": model_tree(plan),
        "search": _search(plan, plan.evidence) if plan.evidence else None,
        "measured": measured_rows(plan, runs) if runs else None,
        "beside": beside_rows(played, other) if other else None,
        "outliers": [asdict(one) for one in outliers(profile)] if profile else None,
        "warnings": _warnings(plan),
        "notes": list(plan.notes),
    }


def _headline(plan: Plan) -> dict[str, Any]:
    predicted, use = plan.predicted, Utilisation.kept(plan)
    assert predicted
    return {
        "model": plan.model.name,
        "parameters": plan.model.num_parameters,
        "cluster": plan.cluster.name,
        "devices": plan.cluster.num_devices,
        "used": plan.world_size,
        "batch": plan.global_batch_size,
        "microbatches": plan.num_microbatches,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "style": style(plan.style).title if plan.style else "",
        "objective": plan.objective,
        "constraints": list(plan.constraints),
        "schedule": plan.schedule.name if len(plan.schedule.rows) > 1 else "",
        "hash": plan.hash,
        "step_s": predicted.step_s,
        "samples_per_s": predicted.samples_per_s,
        "tokens": tokens_per_sample(plan),
        "mfu": use.mfu(predicted.step_s) if use else None,
        "band": predicted.error_band,
        "source": predicted.source,
        "profile": plan.profile.machine if plan.profile else "",
        "versions": plan.versions,
    }


def _search(plan: Plan, evidence: Evidence) -> dict[str, Any]:
    return {
        "searcher": evidence.searcher,
        "seed": evidence.seed,
        "candidates": evidence.candidates,
        "infeasible": evidence.infeasible,
        "exhausted": evidence.exhausted,
        "pruned": evidence.pruned,
        "bound_s": evidence.bound_s,
        "bounded": bounded(plan),
        "gap": evidence.gap,
        "improved": [
            {"at": found.candidates, "name": found.name, "step_s": found.step_s,
             "bound_s": found.bound_s}
            for found in evidence.improved
        ],
        "others": [
            {"name": other.name, "step_s": other.step_s, "peak": other.peak_bytes,
             "why": other.why}
            for other in evidence.alternatives
        ],
    }  # fmt: skip


_NOT_MEASURED = {"assumption": "an assumption", "datasheet": "that of data sheets"}


def _warnings(plan: Plan) -> list[str]:
    """What a reader must know before trusting the figures."""
    found = [str(finding) for finding in plan.verify()]
    predicted = plan.predicted
    assert predicted
    if predicted.detail is None:
        found.append(
            "The plan was not made by this version's search: it keeps no detail, so memory over "
            "time, communication and parameters are missing, and halves of backwards are taken as "
            "equal."
        )
    if known := _NOT_MEASURED.get(predicted.source):
        found.append(
            f"How fast the devices are is {known}, and times are within {predicted.error_band:.0%} "
            "by estimate; `meshwright profile` measures them."
        )
    return found
