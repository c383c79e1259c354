"""`meshwright race`: runs plans that are predicted alike, and keeps the fastest."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from meshwright.arguments.options import MODEL, Data, Json, Target
from meshwright.arguments.targets import load_target
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import STYLE, seconds
from meshwright.ir.text.terminal import Terminal
from meshwright.planner.search.plan_comparison import name_of
from meshwright.tools.race import standing as heats
from meshwright.tools.race.standing import Heat

if TYPE_CHECKING:
    from meshwright.tools.race.racing import Race

out, err = Terminal(), Terminal(stderr=True)


EXAMPLES = (
    f"meshwright race {MODEL} plan.json plan.2.json plan.3.json -o fastest.json",
    f"torchrun --nnodes 2 --nproc-per-node 8 ... -m -- meshwright race {MODEL} plan.json ...",
)


def command(
    target: Target,
    plan_files: Annotated[
        list[Path], typer.Argument(metavar="PLAN...", help="what `search --finalists` wrote")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="where the fastest goes; its journal is beside")
    ] = Path("fastest.json"),
    turns: Annotated[int, typer.Option(min=1, help="how often those in front run")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="steps of a run that count")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="steps before them")] = 2,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Run plans in turns and keep the fastest.

    Under torchrun, this process is one rank; otherwise ranks are started here, and again if a plan
    ends the job: the second time that plan is out.
    """
    from meshwright.running.launch import (  # torch is loaded only where it is needed
        batches,
    )
    from meshwright.running.ranks import run_ranks
    from meshwright.tools.race.racing import check_plans, race

    plans = [plan_io.load(path) for path in plan_files]
    check_plans(plans)
    journal = output.with_suffix(".race")
    if "RANK" not in os.environ and plans[0].world_size > 1:
        raise SystemExit(_start(plans, journal, run_ranks))
    found = load_target(target)
    first = os.environ.get("RANK", "0") == "0"

    def told(plan: Plan, heat: Heat) -> None:
        if first and not as_json:
            _tell(plan_files[heat.number], plan, heat)

    over = race(
        plans, found.model, batches=batches(plans[0], data), loss_fn=found.loss_fn,
        example_inputs=found.example_inputs, turns=turns, steps=steps, warmup=warmup,
        journal=journal, told=told,
    )  # fmt: skip
    if first:
        plan_io.save(over.best, output)
        _print(over, plan_files, output, as_json=as_json)


def _start(plans: list[Plan], journal: Path, run: Callable[..., int]) -> int:
    """Starts the ranks, again while plans end the job; the exit code."""
    hashes = [plan.hash for plan in plans]
    heats.load(journal, hashes)  # what is wrong with it is said before there are ranks
    while code := run(plans[0].world_size, "meshwright", *sys.argv[1:]):
        standing = heats.load(journal, hashes)
        if standing.running is None:  # no plan's fault
            return code
        name = name_of(plans[standing.running])
        again = standing.gone_on()
        goes = "it is out" if standing.running in again.failed else "it gets another chance"
        err.print(f"{name} ended the job (exit code {code}): {goes}", style="red", markup=False)
    return 0


def _tell(path: Path, plan: Plan, heat: Heat) -> None:
    assert plan.predicted
    measured, predicted = seconds(median(heat.steps_s)), seconds(plan.predicted.step_s)
    err.print(
        f"turn {heat.turn + 1}  {measured:>8}  (predicted {predicted})  {path}: {name_of(plan)}",
        markup=False, highlight=False,
    )  # fmt: skip


def _print(over: "Race", files: list[Path], output: Path, *, as_json: bool) -> None:
    rows = [_row(over, number) for number in over.standing.order]
    out_of = [str(files[number]) for number in over.standing.failed]
    if as_json:
        print(json.dumps({"fastest": str(output), "plans": rows, "failed": out_of}, indent=2))
        return
    table = Table("plan", "file", title="The fastest of those that were run", **STYLE)
    for name in ("predicted", "measured", "error", "runs"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, number in zip(rows, over.standing.order, strict=True):
        table.add_row(
            row["plan"], str(files[number]), seconds(row["predicted_s"]),
            seconds(row["measured_s"]), f"{row['error']:+.1%}", str(row["runs"]),
        )  # fmt: skip
    out.print(table)
    for name in out_of:
        out.print(f"{name} ended the job twice and is out", style="red", markup=False)
    out.print(f"wrote {output} ({over.best.hash[:12]})")


def _row(over: "Race", number: int) -> dict[str, Any]:
    """The numbers of one plan."""
    plan, measured_s = over.plans[number], over.step_s(number)
    assert plan.predicted
    return {
        "plan": name_of(plan), "hash": plan.hash, "predicted_s": plan.predicted.step_s,
        "measured_s": measured_s, "error": plan.predicted.step_s / measured_s - 1,
        "runs": sum(heat.number == number for heat in over.standing.heats),
    }  # fmt: skip
