"""`meshwright export`: the plan in the words of other tools, and files that launch it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.arguments.options import MODEL, PlanFile
from meshwright.arguments.targets import cluster_of, load_target
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.verify import check
from meshwright.ir.text.terminal import Terminal
from meshwright.tools.export.export import TARGETS, export, run_command

INCOMPLETE = 4


EXAMPLES = (f"meshwright export plan.json --to megatron --model {MODEL} -o flags.sh",)


def command(
    plan_file: PlanFile,
    to: Annotated[str, typer.Option(help=f"one of {', '.join(TARGETS)}")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the file; printed if not given")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="where the plan's is no preset")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--model", help="module:callable or hf:...; for sizes, and to run it"),
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="what launch files start, such as 'train.py --lr 1e-4'")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="with --model: launch files save into this folder, and go on from it"),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="exit 4 if the target cannot express all of the plan")
    ] = False,
) -> None:
    """Write a plan as configuration of another tool, or as a launch file."""
    plan = plan_io.load(plan_file)
    check(plan)
    found = export(
        plan,
        to,
        cluster_of(plan, cluster),
        command=run_command(plan_file, target, script, save),
        config=_config(target),
    )
    err = Terminal(stderr=True)
    for what in found.missing:
        err.print(f"{to} cannot say: {what}", markup=False, highlight=False, soft_wrap=True)
    if found.missing and strict:
        raise typer.Exit(INCOMPLETE)
    if output is None:
        print(found.text, end="")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(found.text, encoding="utf-8")
    err.print(f"wrote {output}", highlight=False, soft_wrap=True)


def _config(target: str | None) -> Any:
    """The configuration of the model, if it has one as those of transformers do."""
    return None if target is None else getattr(load_target(target, meta=True).model, "config", None)
