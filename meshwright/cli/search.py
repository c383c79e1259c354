"""`meshwright search`: the fastest plan for a model and a cluster, or for the best of several."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.arguments.options import MODEL, Json, Routes, Target
from meshwright.arguments.targets import load_cluster, load_target
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import render
from meshwright.ir.precision import USUAL
from meshwright.ir.text.terminal import Terminal
from meshwright.planner.search.plan_comparison import name_of

if TYPE_CHECKING:
    from meshwright.planner.search.ranking import Ranking

PLAN_FILE = Path("plan.json")
Clusters = Annotated[
    list[str],
    typer.Option(
        "--cluster", "-c",
        help="local:4, h100-sxm:8x8 or cluster.yaml; repeatable: then the best is chosen",
    ),
]  # fmt: skip
Batch = Annotated[
    int | None,
    typer.Option("--global-batch", "-b", help="samples of a step, over all ranks"),
]
Clip = Annotated[float | None, typer.Option(help="gradients are clipped to this global norm")]
Kernels = Annotated[
    str | None,
    typer.Option(
        help="fused kernels to put in: auto (if they pay; the default), none, torch (its own), all "
        "or names; with --as by default those of that stack"
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", help="such as tp=2, 'stage 0 devices 0-3' or 'step<=1.2s'; repeatable"),
]
Objective = Annotated[
    str, typer.Option(help="throughput, memory, cheapest (needs prices) or batch")
]
Headroom = Annotated[
    float, typer.Option(help="share of each device's memory that stays free; 0 fills devices")
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

Allow = Annotated[
    list[str] | None,
    typer.Option(
        help="what of plain training plans may change: delayed, low_rank, second_order, sketch; "
        "may be given again"
    ),
]

Rows = Annotated[
    str | None,
    typer.Option(help="how often rows of tables occur: a file of count_rows, or zipf:1.05"),
]

Survives = Annotated[
    str,
    typer.Option(help="'any node' or 'any device': plans that lose no state with it"),
]

As = Annotated[
    str,
    typer.Option("--as", help="price plans as another stack runs them, such as megatron"),
]


EXAMPLES = (
    f"meshwright search {MODEL} -c h100-sxm:2x8 -b 256 --pin tp=2 -o plan.json",
    f"meshwright search {MODEL} -c local:8 --profile profile.db --finalists 5 -o plan.json",
    "meshwright search 'hf:GPT2Config{\"n_layer\": 48}' -c a100-80:1x8 -c l40s:2x8 -b 128",
)


def command(
    context: typer.Context,
    target: Target,
    cluster: Clusters,
    output: Annotated[Path, typer.Option("--output", "-o", help="where the plan goes")] = PLAN_FILE,
    global_batch_size: Batch = None,
    optimizer: str = "adamw",
    precision: str = USUAL,
    max_grad_norm: Clip = None,
    kernels: Kernels = None,
    style: As = "",
    searcher: str = "auto",
    constraints: Pins = None,
    allow: Allow = None,
    rows: Rows = None,
    routes: Routes = None,
    memory_headroom: Headroom = 0.1,
    objective: Objective = "throughput",
    survives: Survives = "",
    time_limit_s: Annotated[
        float,
        typer.Option("--time-limit", help="seconds of each search; and of the trace, 30 at least"),
    ] = 60.0,
    seed: int = 0,
    profile: Measured = None,
    tensorboard: Logs = None,
    finalists: Finalists = 1,
    as_json: Json = False,
) -> None:
    """Search a plan and write it."""
    # Torch is loaded only where it is needed.
    from meshwright.planner.search.options import SearchOptions
    from meshwright.planner.search.search import rank

    found = load_target(target, meta=True)
    fields = SearchOptions.__dataclass_fields__
    options = SearchOptions(
        **{k: v for k, v in context.params.items() if k in fields and v is not None},
        example_inputs=found.example_inputs,
        loss_fn=found.loss_fn,
        progress=not as_json,
    )
    ranking = rank(found.model, [load_cluster(name) for name in cluster], options)
    for plan, path in _files(ranking, output):
        plan_io.save(plan, path)
    _print_found(ranking, output, several=len(cluster) > 1, as_json=as_json)
    if global_batch_size is None and objective != "batch" and not as_json:
        size = ranking.best.global_batch_size
        Terminal().print(f"the batch is the example's, {size} samples; -b says another one")


def _print_found(ranking: "Ranking", output: Path, *, several: bool, as_json: bool) -> None:
    plan, out = ranking.best, Terminal()
    if as_json:
        clusters = {"clusters": ranking.rows()} if several else {}
        out.print_json(json.dumps(json.loads(plan_io.dumps(plan)) | clusters))
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
