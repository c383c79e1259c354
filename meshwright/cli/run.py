"""`meshwright run`: trains by a plan."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.arguments.options import MODEL, Data, Json, PlanFile, Target

EXAMPLES = (
    f"meshwright run plan.json {MODEL} --data train:batches --steps 100 -o runs/first",
    f"torchrun --nnodes 2 --nproc-per-node 8 ... -m meshwright run plan.json {MODEL}",
)


def command(
    plan_file: PlanFile,
    target: Target,
    steps: Annotated[int, typer.Option(help="optimizer steps to take")] = 10,
    data: Data = None,
    learning_rate: Annotated[float, typer.Option("--lr")] = 1e-4,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="run directory; runs/HASH if not given")
    ] = None,
    trace: Annotated[
        bool, typer.Option(help="leave a profiler's trace of one step per rank")
    ] = True,
    log: Annotated[
        str, typer.Option(help="metrics of each step, into the run directory: jsonl,tensorboard")
    ] = "",
    check: Annotated[
        bool | None,
        typer.Option(help="compare a step with plain PyTorch first; the default"),
    ] = None,
    tune: Annotated[
        bool, typer.Option(help="try sizes of gradient buckets while training, and keep the best")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train. Under torchrun, this process is one rank; otherwise torchrun is started here."""
    from meshwright.running.launch import train

    train(
        plan_file,
        target,
        steps=steps,
        data=data,
        learning_rate=learning_rate,
        output=output,
        trace=trace,
        as_json=as_json,
        log=log,
        check=check,
        tune=tune,
    )
