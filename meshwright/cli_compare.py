"""`meshwright compare`: what a run took beside what its plan predicted."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from meshwright.costmodel.compare import Comparison, Expected, Row, check_run, compare, expected_of
from meshwright.ir import measured, plan_io
from meshwright.ir.measured import Measured
from meshwright.ir.plan import Plan

MIB = 1024**2


def compare_command(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")],
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="what `meshwright run` left")
    ],
    target: Annotated[
        str | None,
        typer.Option("--model", help="predict again, in detail: module:callable or hf:..."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="with --model: local:4 or cluster.yaml")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of a table")
    ] = False,
) -> None:
    """Set what a run took beside what its plan predicted; exit 5 if it is of another plan."""
    plan = plan_io.load(plan_file)
    runs = measured.load_run(run_folder)
    check_run(plan, runs)
    found = compare(plan, _expected(plan, target, cluster, runs), runs)
    if as_json:
        print(json.dumps(as_data(found), indent=2))
    else:
        show(found, Console())


def _expected(
    plan: Plan, target: str | None, cluster: str | None, runs: tuple[Measured, ...]
) -> Expected:
    if target is None:
        return expected_of(plan)
    from meshwright.details import detailed  # torch is loaded only where it is needed

    return detailed(plan, target, cluster, runs)


def as_data(found: Comparison) -> dict[str, Any]:
    """The comparison as plain data, the worst first."""
    rows = [asdict(row) | {"error": row.error} for row in (found.step, *found.rows)]
    return {
        "plan": found.plan,
        "error_band": found.error_band,
        "inside": found.inside,
        "verdict": found.verdict,
        "rows": rows,
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
    console.print(found.verdict, style="green" if found.inside else "red", highlight=False)


def _figure(row: Row, value: float) -> str:
    return f"{value / MIB:,.2f} MiB" if row.unit == "bytes" else f"{value * 1e3:,.3f} ms"
