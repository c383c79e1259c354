"""What is wrong or doubtful with a plan file: each finding with its rule and what is legal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from meshwright.forms.captured import capture_findings
from meshwright.forms.methods import method_findings, method_gives_up
from meshwright.forms.retention import findings as retention_findings
from meshwright.forms.stepping import owner_notes, update_findings
from meshwright.forms.survival import survival_findings
from meshwright.forms.sync import given_up
from meshwright.forms.sync_findings import findings as sync_findings
from meshwright.forms.tables import stepping_notes, table_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.ir.plan.verify import verify
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.route_counts import RouteCounts
from meshwright.planner.pins.known import in_order

STALE = 0.01
"""Relative change of the predicted step from which a stored prediction is called stale."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A plan as it was read, and what there is to say about it."""

    plan: Plan | None
    findings: tuple[Finding, ...]
    fresh: Plan | None = None
    """The plan with today's prediction, where model and cluster are known."""

    @property
    def is_broken(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)


def read_plan(path: Path, *, rehash: bool = False) -> Checked:
    """The plan in a file with what is wrong with the file itself."""
    try:
        plan = plan_io.load(path, check_hash=False)
    except PlanError as error:
        return Checked(None, (Finding("schema", str(error), "`meshwright schema` prints it"),))
    wrong = plan_io.edited(plan)
    if not wrong:
        return Checked(plan, ())
    if rehash:
        # Whatever was predicted was predicted of another plan.
        return Checked(replace(plan, predicted=None, evidence=None), ())
    message = f"{wrong}: the plan was edited or damaged"
    return Checked(plan, (Finding("hash", message, f"`meshwright check {path} --rehash`"),))


def check_plan(
    read: Checked,
    graph: Graph | None = None,
    cluster: Cluster | None = None,
    profile: Profile | None = None,
) -> Checked:
    """All findings on a plan that was read; with model and cluster it is priced again."""
    plan = read.plan
    if plan is None:
        return read
    findings = [
        *read.findings, *retention_findings(plan), *verify(plan, graph, cluster),
        *sync_findings(plan), *capture_findings(plan), *_unsaid(plan), *method_findings(plan),
        *(f for d in in_order() if d.findings is not None for f in d.findings(plan)),
    ]  # fmt: skip
    if graph is not None and not any(f.severity == "error" for f in findings):
        findings += [*table_findings(plan, graph), *update_findings(plan, graph)]
        findings += capture_findings(plan, graph)
    if not any(f.severity == "error" for f in findings):
        findings += stepping_notes(plan)
        findings += owner_notes(plan, graph) if graph is not None else ()
        findings += survival_findings(plan, cluster) if cluster is not None else ()
    legal = not any(f.severity == "error" and f.rule not in ("hash", "memory") for f in findings)
    if graph is None or cluster is None or not legal or plan.method:
        doubts = (*_unpriced(plan), *_versions(plan), *_other_profile(plan, profile))
        return Checked(plan, (*findings, *doubts))
    fresh = price(plan, graph, cluster, profile)
    doubts = (*_versions(plan), *_other_profile(plan, profile), *_drift(plan, fresh))
    findings = [f for f in findings if f.rule != "memory"]
    return Checked(plan, (*findings, *_memory(fresh, cluster), *doubts), fresh)


def price(plan: Plan, graph: Graph, cluster: Cluster, profile: Profile | None) -> Plan:
    """The plan with what the cost model of today expects of it."""
    from meshwright.planner.problem.candidates import (
        profile_id,  # torch is loaded only where needed
    )
    from meshwright.planner.problem.predict import in_detail, predict_plan
    from meshwright.planner.problem.problem import make_problem

    problem = make_problem(
        graph, cluster, optimizer=plan.optimizer, precision=plan.precision,
        max_grad_norm=plan.max_grad_norm, profile=profile, style=plan.style,
        routes=RouteCounts.load(plan.routing),
    )  # fmt: skip
    priced = replace(
        plan, predicted=predict_plan(problem, plan), profile=profile_id(problem),
        gives_up=given_up(plan),
    )  # fmt: skip
    return plan_io.rehash(in_detail(problem, priced))


def _memory(fresh: Plan, cluster: Cluster) -> Iterator[Finding]:
    yield from (f for f in verify(fresh, None, cluster) if f.rule == "memory")


def _unsaid(plan: Plan) -> Iterator[Finding]:
    """What of plain training an edited plan changes, and does not say so."""
    for what in (*given_up(plan), *method_gives_up(plan)):
        if what not in plan.gives_up:
            message = f"the plan does not say what it gives up: {what}"
            yield Finding("gives_up", message, "check it with --model and --cluster", "warning")


def _unpriced(plan: Plan) -> Iterator[Finding]:
    if plan.predicted is None and plan.method is None:
        yield Finding(
            "stale", "the plan has no prediction", "check it with --model and --cluster", "warning"
        )


def _versions(plan: Plan) -> Iterator[Finding]:
    for name, then in plan.versions.items():
        now = _installed(name)
        if now and now != then:
            message = f"the plan was made with {name} {then}, this is {now}"
            yield Finding("stale", message, "check it with --model and --cluster", "warning")


def _installed(name: str) -> str:
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):  # the latter of an empty name
        return ""


def _other_profile(plan: Plan, profile: Profile | None) -> Iterator[Finding]:
    if profile is None:
        return
    if plan.profile is None:
        message = "the plan was predicted without measurements; a profile is given"
    elif plan.profile.fingerprint != profile.fingerprint:
        message = (
            f"the plan rests on profile {plan.profile.fingerprint[:12]}, given is "
            f"{profile.fingerprint[:12]}"
        )
    else:
        return
    yield Finding("stale", message, "search again with this profile", "warning")


def _drift(plan: Plan, fresh: Plan) -> Iterator[Finding]:
    """Whether the stored prediction is still what the cost model says."""
    assert fresh.predicted
    if plan.predicted is None:
        return
    then, now = plan.predicted.step_s, fresh.predicted.step_s
    if abs(now - then) > STALE * then:
        message = (
            f"the plan says {seconds(then)} per step, the cost model now says {seconds(now)} "
            f"({now / then - 1:+.1%})"
        )
        yield Finding("stale", message, "write it anew with -o, or search again", "warning")
