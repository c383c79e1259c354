"""`meshwright compare`: what a run took beside what its plan predicted."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.arguments.options import Json, PlanFile, WithCluster, WithProfile
from meshwright.costmodel.explain.compare import (
    ComparedFigure,
    Comparison,
    check_run,
    compare,
    expected_of,
)
from meshwright.ir.plan import plan_io
from meshwright.ir.profile import measured
from meshwright.ir.text.terminal import Terminal
from meshwright.ir.text.units import size

EXAMPLES = ("meshwright compare plan.json runs/first",)


def command(
    plan_file: PlanFile,
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="what `meshwright run` left")
    ],
    target: Annotated[
        str | None,
        typer.Option("--model", help="predict again, in detail: module:callable or hf:..."),
    ] = None,
    cluster: WithCluster = None,
    profile: WithProfile = None,
    learn: Annotated[
        Path | None, typer.Option(help="with --model: a profile that the run is folded into")
    ] = None,
    as_json: Json = False,
) -> None:
    """Set what a run took beside what its plan predicted; exit 5 if it is of another plan."""
    if target is None and (profile or learn or cluster):
        raise typer.BadParameter("--cluster, --profile and --learn need --model")
    plan = plan_io.load(plan_file)
    runs = measured.load_run(run_folder)
    check_run(plan, runs)
    if target is None:
        _print(compare(plan, expected_of(plan), runs), as_json=as_json)
        return
    from meshwright.tools.repredict import Details  # torch is loaded only where it is needed

    details = Details.of(plan, target, cluster, runs)
    if learn is None:
        _print(details.compared(profile), as_json=as_json)
        return
    before, after, count = details.teach(learn)
    _print(after, as_json=as_json, learned={"records": count, "before": before.verdict})
    if not as_json:
        Terminal().print(f"{learn} took up {count} records; before: {before.verdict}", markup=False)


def _print(found: Comparison, *, as_json: bool, learned: dict[str, Any] | None = None) -> None:
    if as_json:
        print(json.dumps(as_data(found) | ({"learned": learned} if learned else {}), indent=2))
    else:
        show(found, Terminal())


def as_data(found: Comparison) -> dict[str, Any]:
    """The comparison as plain data, the worst first."""
    rows = [asdict(row) | {"error": row.error} for row in (found.step, *found.rows)]
    return {
        "plan": found.plan,
        "error_band": found.error_band,
        "inside": found.inside,
        "verdict": found.verdict,
        "rows": rows,
        "sent": [
            row.kind._asdict()
            | {
                "link": row.link,
                "predicted": row.predicted,
                "counted": row.counted,
                "error": row.error,
            }
            for row in found.sent
        ],
        "kernels": [asdict(kernel) for kernel in found.kernels],
    }


def show(found: Comparison, console: Console) -> None:
    """Prints the comparison."""
    table = Table("", "what", title="Predicted against measured")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (found.step, *found.rows):
        error = "" if row.error is None else f"{row.error:+.1%}"
        predicted = "" if row.predicted is None else _figure(row, row.predicted)
        table.add_row(row.group, row.what, predicted, _figure(row, row.measured), error)
    console.print(table)
    _show_sent(found, console)
    _show_kernels(found, console)
    if any(row.group == "collective" and row.predicted is None for row in found.rows):
        console.print("What collectives should take is worked out with --model.", style="dim")
    console.print(found.verdict, style="green" if found.inside else "red", highlight=False)


def _show_sent(found: Comparison, console: Console) -> None:
    """Bytes by stage, form and axis, where the plan says what it sends."""
    if not found.sent:
        return
    table = Table("stage", "what", "form", "axis, link", title="Bytes that a rank sends in a step")
    for name in ("predicted", "counted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.sent:
        error = "" if row.error is None else f"{row.error:+.1%}"
        predicted = "" if row.predicted is None else size(row.predicted)
        where = f"{row.kind.axis}, {row.link}" if row.link else row.kind.axis
        own = str(row.kind.stage), row.kind.purpose, row.kind.form
        table.add_row(*own, where, predicted, size(row.counted), error)
    console.print(table)


def _show_kernels(found: Comparison, console: Console) -> None:
    """Which way calls of fused kernels went, if the plan has any."""
    if not found.kernels:
        return
    table = Table("kernel", "way", "why", title="Calls of fused kernels")
    table.add_column("calls", justify="right", no_wrap=True)
    for kernel in found.kernels:
        table.add_row(kernel.kernel, kernel.way, kernel.why, str(kernel.calls))
    console.print(table)


def _figure(row: ComparedFigure, value: float) -> str:
    return size(value) if row.unit == "bytes" else f"{value * 1e3:,.3f} ms"
