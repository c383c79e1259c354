"""`meshwright run`: trains by a plan."""

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.arguments.options import MODEL, Data, Json, PlanFile, Target
from meshwright.ir.errors import PlanError
from meshwright.running.memory_folder import NEIGHBOUR
from meshwright.runtime.world.patience import HANG_S

EXAMPLES = (
    f"meshwright run plan.json {MODEL} --data train:batches --steps 100 -o runs/first",
    f"meshwright run plan.json {MODEL} --save checkpoints --save-every 10m --keep 2 --resume",
    f"meshwright run plan.json {MODEL} --save checkpoints --elastic --rdzv node-0:29500",
    f"torchrun --nnodes 2 --nproc-per-node 8 ... -m -- meshwright run plan.json {MODEL}",
)


Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="run directory; runs/HASH if not given")
]
Trace = Annotated[bool, typer.Option(help="leave a profiler's trace of one step per rank")]
Log = Annotated[
    str,
    typer.Option(
        help="metrics of each step, into the run directory: jsonl,tensorboard; or wandb, mlflow"
    ),
]
Check = Annotated[
    bool | None, typer.Option(help="compare a step with plain PyTorch first; the default")
]
Tune = Annotated[
    bool, typer.Option(help="try sizes of gradient buckets while training, and keep the best")
]
Save = Annotated[
    Path | None, typer.Option(help="folder of checkpoints; without it nothing is saved")
]
SaveEvery = Annotated[
    str | None, typer.Option(help="with --save: steps such as 100, a time such as 10m, or auto")
]
Keep = Annotated[int, typer.Option(min=1, help="so many checkpoints stay")]
Resume = Annotated[
    bool, typer.Option(help="go on from the newest checkpoint in --save, if there is one")
]
OnNonfinite = Annotated[
    str,
    typer.Option(
        help="of a loss or gradients that are no numbers: stop, skip the step, back (to the "
        "newest checkpoint, and on without that batch), warn or ignore"
    ),
]
Hang = Annotated[
    float,
    typer.Option("--hang", min=1, help="at most so many seconds without progress, then it ends"),
]
Elastic = Annotated[
    bool,
    typer.Option(
        help="with --save: go on with what is left of the machines when ranks die or hang"
    ),
]
RetryLost = Annotated[
    float,
    typer.Option(
        "--retry-lost",
        min=0,
        help="with --elastic: seconds until a device that was lost is tried again",
    ),
]
MemorySavesAt = Annotated[
    str,
    typer.Option(
        "--memory-saves",
        help="with --elastic: keep the newest state in memory too, of its machine and of a "
        "neighbour, so that no node's death takes it along; machine (its own alone), or off",
    ),
]
Rdzv = Annotated[
    str | None,
    typer.Option(
        help="with --elastic, on each of several nodes: HOST:PORT of the one where they meet, or "
        "several, each of which may take over"
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(help="with --rdzv: MIN:MAX nodes; the job waits for more where there are fewer"),
]
NodeNumber = Annotated[
    int | None,
    typer.Option("--node", min=0, help="with --rdzv: which node of the cluster this is, from 0"),
]
ClusterOfPlan = Annotated[
    str | None, typer.Option(help="with --elastic: the plan's cluster, if it is no preset")
]


def command(
    context: typer.Context,
    plan_file: PlanFile,
    target: Target,
    steps: Annotated[int, typer.Option(help="optimizer steps to take")] = 10,
    data: Data = None,
    learning_rate: Annotated[float, typer.Option("--lr")] = 1e-4,
    output: Output = None,
    trace: Trace = True,
    log: Log = "",
    check: Check = None,
    tune: Tune = False,
    save: Save = None,
    save_every: SaveEvery = None,
    keep: Keep = 1,
    resume: Resume = False,
    on_nonfinite: OnNonfinite = "stop",
    hang_s: Hang = HANG_S,
    elastic: Elastic = False,
    retry_lost_s: RetryLost = 600.0,
    memory_saves: MemorySavesAt = NEIGHBOUR,
    cluster: ClusterOfPlan = None,
    rdzv: Rdzv = None,
    nodes: Nodes = None,
    node: NodeNumber = None,
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
    if rdzv is None and (nodes is not None or node is not None):
        raise PlanError("--nodes and --node need --rdzv HOST:PORT, the place where nodes meet")
    if rdzv is not None and not elastic:
        raise PlanError("--rdzv needs --elastic; otherwise nodes are started by torchrun --rdzv-*")
    if elastic and "RANK" not in os.environ:
        from meshwright.running.elastic import run_elastic
        from meshwright.running.nodes.nodes_choice import NodesChoice

        raise SystemExit(
            run_elastic(
                plan_file, target, _of_ranks(context), output=output, cluster=cluster,
                retry_lost_s=retry_lost_s, as_json=as_json,
                nodes=None if rdzv is None else NodesChoice.parse(rdzv, nodes, node), save=save,
                memory_saves=memory_saves,
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


_OF_SUPERVISOR = frozenset(
    {
        "output",
        "log",
        "elastic",
        "retry_lost_s",
        "memory_saves",
        "cluster",
        "as_json",
        "rdzv",
        "nodes",
        "node",
    }
)
"""Options that its ranks do not get as they are."""


def _of_ranks(context: typer.Context) -> list[str]:
    """The arguments of a rank, but for its plan and run directory; it logs its steps."""
    given = context.params
    found = [given["target"]]
    for option in context.command.params:
        value = given.get(option.name or "")
        if option.param_type_name != "option" or option.name in _OF_SUPERVISOR:
            continue
        if value == option.get_default(context):
            continue
        if isinstance(value, bool):
            found += (option.opts if value else option.secondary_opts)[:1]
        else:
            found += [option.opts[0], str(value)]
    kinds = [kind for kind in given["log"].split(",") if kind]
    return [*found, "--log", ",".join(dict.fromkeys((*kinds, "jsonl")))]
