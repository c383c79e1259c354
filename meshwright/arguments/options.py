"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")]
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="module:callable or hf:ConfigClass{json}")
]
Data = Annotated[
    str | None, typer.Option(help="module:callable returning an iterable of global batches")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
WithCluster = Annotated[
    str | None, typer.Option("--cluster", "-c", help="with --model: local:4 or cluster.yaml")
]
WithProfile = Annotated[
    Path | None, typer.Option(help="with --model: measurements to predict with")
]
Routes = Annotated[
    str | None,
    typer.Option(help="where tokens of mixtures go: a file of count_routes, or zipf:0.5"),
]
MODEL = "train:build_model"
"""The model of examples."""
