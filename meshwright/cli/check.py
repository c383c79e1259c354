"""`meshwright check`: is this plan sound, does it fit, is its estimate current, does it run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.arguments.options import MODEL, Json, Routes
from meshwright.arguments.targets import load_cluster, load_target
from meshwright.ir.errors import Infeasible
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import render
from meshwright.ir.text.canonical import parse_json, read_text
from meshwright.ir.text.terminal import Terminal
from meshwright.planner.search.handwritten import is_minimal, parse_minimal
from meshwright.tools.check import Checked, check_plan, read_plan

BROKEN = 4


EXAMPLES = (
    "meshwright check plan.json --rehash",
    f"meshwright check by_hand.json --model {MODEL} -c a100-80:4x8 -o plan.json --dry-run",
)


def command(
    plan_file: Annotated[
        Path, typer.Argument(metavar="PLAN", help="a plan, or one by hand: {'tp': 4, 'pp': 2}")
    ],
    target: Annotated[
        str | None, typer.Option("--model", help="module:callable or hf:ConfigClass{json}")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="local:4, h100-sxm:8x8 or cluster.yaml")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="where the completed or newly priced plan goes"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="price it with what `meshwright profile` measured")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch", "-b", help="of a plan by hand without one")
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", help="to complete a plan by hand")
    ] = 60.0,
    routes: Routes = None,
    rehash: Annotated[
        bool, typer.Option(help="accept a plan edited by hand: check it, then renew its hash")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="also step every rank of it on fake tensors")
    ] = False,
    strict: Annotated[bool, typer.Option(help="warnings count as errors")] = False,
    as_json: Json = False,
) -> None:
    """Check a plan by every rule, or complete and price one by hand; exit 4 if a rule is broken."""
    _need(target, cluster, output=output, profile=profile)
    if dry_run and target is None:
        raise typer.BadParameter("--dry-run needs --model")
    if is_minimal(parse_json(read_text(plan_file), str(plan_file))):
        if rehash:
            raise typer.BadParameter("--rehash is for whole plans; this one has no hash yet")
        checked = _completed(
            plan_file, target, cluster, global_batch_size, time_limit_s, profile, routes,
            quiet=as_json,
        )  # fmt: skip
    else:
        if global_batch_size is not None:
            raise typer.BadParameter("--global-batch is for plans by hand; this one has its own")
        if routes is not None:
            raise typer.BadParameter("--routes is for plans by hand; this one has its own, if any")
        checked = _checked(plan_file, target, cluster, profile, rehash=rehash)
    if dry_run and target and not checked.is_broken:
        checked = _stepped(checked, target, quiet=as_json)
    written = _write(checked, plan_file, output, rehash=rehash)
    _print(checked, written, as_json=as_json)
    doubtful = any(f.severity == "warning" for f in checked.findings)
    if checked.is_broken or (strict and doubtful):
        raise typer.Exit(BROKEN)


def _need(target: str | None, cluster: str | None, **given: object) -> None:
    """What prices a plan needs a model and a cluster."""
    for name, value in given.items():
        if value and (target is None or cluster is None):
            raise typer.BadParameter(f"--{name} needs --model and --cluster")


def _completed(
    path: Path,
    target: str | None,
    cluster: str | None,
    global_batch_size: int | None,
    time_limit_s: float,
    profile: Path | None,
    routes: str | None,
    *,
    quiet: bool,
) -> Checked:
    """A hand-written plan as a whole one; if none fits, the one that exceeds memory least."""
    if target is None or cluster is None:
        parse_minimal(parse_json(read_text(path), str(path)), str(path))
        raise typer.BadParameter("a plan by hand is completed for --model and --cluster")
    from meshwright.ir.trace.within import traced_within
    from meshwright.planner.search.complete import least_excess, minimal_problem
    from meshwright.planner.search.search import search_problem

    found, machines = load_target(target, meta=True), load_cluster(cluster)
    with traced_within(time_limit_s):
        problem = minimal_problem(
            path, found.model, machines, global_batch_size=global_batch_size,
            example_inputs=found.example_inputs, loss_fn=found.loss_fn, profile=profile,
            routes=routes,
        )  # fmt: skip
    try:
        plan = search_problem(problem, time_limit_s=time_limit_s, progress=not quiet)
    except Infeasible as error:
        too_large = least_excess(problem, time_limit_s)
        if too_large is None:
            raise
        checked = check_plan(Checked(too_large, ()), problem.graph, machines)
        return Checked(None, (*checked.findings, Finding("constraints", str(error))), checked.fresh)
    return Checked(plan, (), plan)


def _checked(
    path: Path, target: str | None, cluster: str | None, profile: Path | None, *, rehash: bool
) -> Checked:
    read = read_plan(path, rehash=rehash)
    if read.plan is None:
        return read
    graph = _graph(read.plan, target) if target else None
    machines = load_cluster(cluster) if cluster else None
    measured = None
    if profile is not None:
        from meshwright.ir.profile.profile_store import load_profile

        measured = load_profile(profile)
    return check_plan(read, graph, machines, measured)


def _stepped(checked: Checked, target: str, *, quiet: bool) -> Checked:
    """With what a dry run finds."""
    from meshwright.tools.dry.run import dry_run
    from meshwright.tools.dry.show import show

    plan = checked.fresh or checked.plan
    assert plan is not None
    done = dry_run(plan, _graph(plan, target))
    if not quiet:
        show(done, Terminal())
    return replace(checked, findings=(*checked.findings, *done.findings))


def _graph(plan: Plan, target: str) -> Any:
    from meshwright.ir.trace.trace import trace  # torch is loaded only where it is needed

    found = load_target(target, meta=True)
    return trace(
        found.model, found.example_inputs, found.loss_fn,
        global_batch_size=plan.global_batch_size, kernels=plan.kernels, precision=plan.precision,
    )  # fmt: skip


def _write(checked: Checked, path: Path, output: Path | None, *, rehash: bool) -> str:
    """Where a plan was written to, if anywhere."""
    if checked.is_broken or checked.plan is None:
        return ""
    plan = checked.fresh or checked.plan
    if rehash:
        plan_io.save(plan, path)
    if output is not None:
        plan_io.save(plan, output)
    return str(output or (path if rehash else ""))


def _print(checked: Checked, written: str, *, as_json: bool) -> None:
    plan = checked.fresh or checked.plan
    if as_json:
        rows = [
            {"rule": f.rule, "severity": f.severity, "message": f.message, "nearest": f.nearest}
            for f in checked.findings
        ]
        whole = json.loads(plan_io.dumps(plan)) if plan else None
        print(json.dumps({"findings": rows, "written": written, "plan": whole}))
        return
    out = Terminal()
    if checked.fresh is not None:
        out.print(render(checked.fresh))
    for finding in checked.findings:
        out.print(f"{finding.severity}: {finding}", markup=False, highlight=False, soft_wrap=True)
    if plan is not None and not checked.is_broken:
        out.print(f"the plan is sound ({plan_io.content_hash(plan)[:12]})", highlight=False)
    if written:
        out.print(f"wrote {written}", highlight=False, soft_wrap=True)
