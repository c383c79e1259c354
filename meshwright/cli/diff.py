"""`meshwright diff`: two plans side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.arguments.options import Json
from meshwright.ir.plan import plan_io
from meshwright.ir.text.terminal import Terminal
from meshwright.tools.diff.show import as_data, difference, render

EXAMPLES = ("meshwright diff a.json b.json",)


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help="a plan file")],
    second: Annotated[Path, typer.Argument(metavar="B", help="another one")],
    as_json: Json = False,
) -> None:
    """Compare two plans: how they are built, what they take, and what they send."""
    names = ("a", "b") if first.stem == second.stem else (first.stem, second.stem)
    found = difference(plan_io.load(first), plan_io.load(second), names)
    if as_json:
        print(json.dumps(as_data(found), indent=2))
    else:
        Terminal().print(render(found), highlight=False)
