"""`meshwright run`: trains by a plan."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.arguments.options import MODEL, Data, Json, PlanFile, Target
from meshwright.ir.errors import PlanError

EXAMPLES = (
    f"meshwright run plan.json {MODEL} --data train:batches --steps 100 -o runs/first",
    f"meshwright run plan.json {MODEL} --save checkpoints --save-every 10m --keep 2 --resume",
    f"torchrun --nnodes 2 --nproc-per-node 8 ... -m -- meshwright run plan.json {MODEL}",
)


def command(
    context: typer.Context,
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
    save: Annotated[
        Path | None, typer.Option(help="folder of checkpoints; without it nothing is saved")
    ] = None,
    save_every: Annotated[
        str | None, typer.Option(help="with --save: steps such as 100, or a time such as 10m")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="so many checkpoints stay")] = 1,
    resume: Annotated[
        bool, typer.Option(help="go on from the newest checkpoint in --save, if there is one")
    ] = False,
    on_nonfinite: Annotated[
        str,
        typer.Option(
            help="of a loss or gradients that are no numbers: stop, skip the step, back (to the "
            "newest checkpoint, and on without that batch), warn or ignore"
        ),
    ] = "stop",
    hang_s: Annotated[
        float,
        typer.Option(
            "--hang", min=1, help="at most so many seconds without progress, then it ends"
        ),
    ] = 1800.0,
    elastic: Annotated[
        bool,
        typer.Option(
            help="with --save: go on with what is left of this machine when ranks die or hang"
        ),
    ] = False,
    retry_lost_s: Annotated[
        float,
        typer.Option(
            "--retry-lost",
            min=0,
            help="with --elastic: seconds until a device that was lost is tried again",
        ),
    ] = 600.0,
    cluster: Annotated[
        str | None, typer.Option(help="with --elastic: the plan's cluster, if it is no preset")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train. Under torchrun, this process is one rank; otherwise the ranks are started here.

    Exit code 75: the job was asked to end and has saved; started again with --resume it goes on.
    """
    if save is None and (save_every is not None or resume or elastic):
        raise PlanError(
            "--save-every, --resume and --elastic need --save FOLDER, the folder of checkpoints"
        )
    if on_nonfinite == "back" and save is None:
        raise PlanError("--on-nonfinite back needs --save FOLDER, the folder of checkpoints")
    if elastic and "RANK" not in os.environ:
        from meshwright.running.elastic import run_elastic

        raise SystemExit(
            run_elastic(
                plan_file, target, _of_ranks(context.params), output=output, cluster=cluster,
                retry_lost_s=retry_lost_s,
            )
        )  # fmt: skip
    from meshwright.running.launch import SavingChoice, train

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
        on_nonfinite=on_nonfinite,
        hang_s=hang_s,
        saving=None if save is None else SavingChoice(save, save_every, keep, resume),
    )


_OPTIONS = {
    "steps": "--steps", "data": "--data", "learning_rate": "--lr", "save": "--save",
    "save_every": "--save-every", "keep": "--keep", "on_nonfinite": "--on-nonfinite",
    "hang_s": "--hang",
}  # fmt: skip
_SWITCHES = {"trace": "trace", "check": "check", "tune": "tune", "resume": "resume"}


def _of_ranks(given: Mapping[str, Any]) -> list[str]:
    """The arguments of a rank, but for its plan and run directory; it logs its steps."""
    found = [given["target"]]
    for name, option in _OPTIONS.items():
        if given[name] is not None:
            found += [option, str(given[name])]
    for name, switch in _SWITCHES.items():
        if given[name] is not None and (given[name] or name not in ("tune", "resume")):
            found.append(f"--{switch}" if given[name] else f"--no-{switch}")
    kinds = [kind for kind in given["log"].split(",") if kind]
    return [*found, "--log", ",".join(dict.fromkeys((*kinds, "jsonl")))]
