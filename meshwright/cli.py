"""The command line: `meshwright search`, `run`, `check`, `explain` and the like.

Exit codes: 0 done; 1 a failure while running; 2 wrong usage; 3 no plan meets the constraints;
4 an input (plan, cluster, model) breaks a rule; 5 ranks or world do not match the plan.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from meshwright.cli_check import check_command
from meshwright.cli_compare import compare_command
from meshwright.cli_diff import diff_command
from meshwright.cli_examples import example
from meshwright.cli_explain import explain_command
from meshwright.cli_export import export_command
from meshwright.cli_profile import profile_command
from meshwright.cli_race import race_command
from meshwright.cli_report import report_command
from meshwright.ir import plan_io
from meshwright.ir.errors import Infeasible, MeshwrightError, MismatchError
from meshwright.ir.plan import Plan
from meshwright.ir.show import render
from meshwright.ir.terminal import Terminal
from meshwright.planner.why import name_of
from meshwright.runtime import children
from meshwright.targets import load_cluster, load_target

if TYPE_CHECKING:
    from meshwright.planner.ranking import Ranking

app = typer.Typer(
    help="Find the fastest way to train a PyTorch model on a cluster, look at it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out, err = Terminal(), Terminal(stderr=True)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="module:callable or hf:ConfigClass{json}")
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")]


def _print_json(content: dict[str, Any]) -> None:
    out.print_json(json.dumps(content))


PLAN_FILE = Path("plan.json")
Clusters = Annotated[
    list[str],
    typer.Option(
        "--cluster", "-c",
        help="local:4, h100-sxm:8x8 or cluster.yaml; repeatable: then the best is chosen",
    ),
]  # fmt: skip
Clip = Annotated[float | None, typer.Option(help="gradients are clipped to this global norm")]
Kernels = Annotated[
    str,
    typer.Option(
        help="fused kernels to put in: none, torch (its own), auto (if they pay), all or names"
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", help="such as tp=2, 'stage 0 devices 0-3' or 'step<=1.2s'; repeatable"),
]
Objective = Annotated[
    str, typer.Option(help="throughput, memory, cheapest (needs prices) or batch")
]
Measured = Annotated[
    Path | None, typer.Option(help="what `meshwright profile` measured of the machines")
]
Logs = Annotated[Path | None, typer.Option(help="where `--searcher dqn` logs its training")]

Finalists = Annotated[
    int,
    typer.Option(
        help="so many plans at most, the best and those predicted to take little more: "
        "plan.json, plan.2.json, ...; `race` runs them"
    ),
]  # fmt: skip


@app.command("search", epilog=example("search"))
def search_command(
    target: TargetArgument,
    cluster: Clusters,
    output: Annotated[Path, typer.Option("--output", "-o", help="where the plan goes")] = PLAN_FILE,
    global_batch_size: Annotated[int | None, typer.Option("--global-batch", "-b")] = None,
    optimizer: str = "adamw",
    precision: str = "bf16",
    max_grad_norm: Clip = None,
    kernels: Kernels = "none",
    searcher: str = "auto",
    constraint: Pins = None,
    objective: Objective = "throughput",
    time_limit_s: Annotated[float, typer.Option("--time-limit")] = 60.0,
    seed: int = 0,
    profile: Measured = None,
    tensorboard: Logs = None,
    finalists: Finalists = 1,
    as_json: Json = False,
) -> None:
    """Search a plan and write it."""
    from meshwright.planner.search import rank  # torch is loaded only where it is needed

    found = load_target(target, meta=True)
    ranking = rank(
        found.model,
        [load_cluster(name) for name in cluster],
        global_batch_size=global_batch_size,
        example_inputs=found.example_inputs,
        loss_fn=found.loss_fn,
        optimizer=optimizer,
        precision=precision,
        max_grad_norm=max_grad_norm,
        kernels=kernels,
        searcher=searcher,
        constraints=tuple(constraint or ()),
        objective=objective,
        time_limit_s=time_limit_s,
        seed=seed,
        progress=not as_json,
        profile=profile,
        tensorboard=tensorboard,
        finalists=finalists,
    )
    for plan, path in _files(ranking, output):
        plan_io.save(plan, path)
    _print_found(ranking, output, several=len(cluster) > 1, as_json=as_json)


def _print_found(ranking: "Ranking", output: Path, *, several: bool, as_json: bool) -> None:
    plan = ranking.best
    if as_json:
        clusters = {"clusters": ranking.rows()} if several else {}
        _print_json(json.loads(plan_io.dumps(plan)) | clusters)
        return
    if several:
        out.print(ranking.table())
    out.print(render(plan))
    for each, path in _files(ranking, output):
        out.print(f"wrote {path} ({each.hash[:12]}): {name_of(each)}", highlight=False)


def _files(ranking: "Ranking", output: Path) -> list[tuple[Plan, Path]]:
    """plan.json for the best plan, plan.2.json and so on for the others."""
    return [
        (plan, output if number == 1 else output.with_suffix(f".{number}{output.suffix}"))
        for number, plan in enumerate(ranking.finalists, 1)
    ]


@app.command(epilog=example("show"))
def show(plan_file: PlanArgument, as_json: Json = False) -> None:
    """Print a plan as tables."""
    plan = plan_io.load(plan_file)
    if as_json:
        _print_json(json.loads(plan_io.dumps(plan)))
    else:
        out.print(render(plan))


@app.command(epilog=example("schema"))
def schema() -> None:
    """Print the JSON Schema of plan files."""
    _print_json(plan_io.json_schema())


@app.command(epilog=example("run"))
def run(
    plan_file: PlanArgument,
    target: TargetArgument,
    steps: Annotated[int, typer.Option(help="optimizer steps to take")] = 10,
    data: Annotated[
        str | None,
        typer.Option(help="module:callable returning an iterable of global batches"),
    ] = None,
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
    as_json: Json = False,
) -> None:
    """Train. Under torchrun, this process is one rank; otherwise torchrun is started here."""
    from meshwright.launch import train

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
    )


app.command("check", epilog=example("check"))(check_command)
app.command("compare", epilog=example("compare"))(compare_command)
app.command("diff", epilog=example("diff"))(diff_command)
app.command("explain", epilog=example("explain"))(explain_command)
app.command("export", epilog=example("export"))(export_command)
app.command("profile", epilog=example("profile"))(profile_command)
app.command("race", epilog=example("race"))(race_command)
app.command("report", epilog=example("report"))(report_command)


def _fail(error: Exception, code: int) -> NoReturn:
    err.print(f"{type(error).__name__}: {error}", style="red", highlight=False, soft_wrap=True)
    raise SystemExit(code)


def main(command: Callable[[], None] = app) -> None:
    """Entry point: turns our errors into one line and an exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank does not outlive torchrun
        children.die_with_parent()
    try:
        command()
    except Infeasible as error:
        _fail(error, 3)
    except MismatchError as error:
        _fail(error, 5)
    except MeshwrightError as error:
        _fail(error, 4)
