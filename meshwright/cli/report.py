"""`meshwright report`: a plan as one page, or its predicted step as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.arguments.options import PlanFile
from meshwright.ir.plan import plan_io
from meshwright.ir.text.terminal import Terminal
from meshwright.tools.report.page import write_report
from meshwright.tools.report.trace import write_trace

EXAMPLES = (
    "meshwright report plan.json --run runs/first -o plan.html",
    "meshwright report plan.json --beside other.json -o both.html",
)


def command(
    plan_file: PlanFile,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="where the page goes; PLAN.html if not given"),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN_DIR", help="also show what `meshwright run` left"),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option("--beside", metavar="OTHER_PLAN", help="also show another plan beside it"),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="also say which measurements of a profile look disturbed"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="write the predicted step as a Chrome trace, for Perfetto"),
    ] = None,
) -> None:
    """Write a plan as a page that needs no network, or its predicted step as a trace."""
    plan = plan_io.load(plan_file)
    console = Terminal()
    if trace is not None:
        write_trace(plan, trace)
        console.print(f"wrote {trace}: open it at ui.perfetto.dev", markup=False)
    # What only a page shows asks for one.
    if trace is None or any(given is not None for given in (output, run, beside, profile)):
        page = output or plan_file.with_suffix(".html")
        other = plan_io.load(beside) if beside else None
        write_report(plan, page, run, beside=other, profile=profile)
        console.print(f"wrote {page}", markup=False)
