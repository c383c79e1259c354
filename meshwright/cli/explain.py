"""`meshwright explain`: where time and memory go, what binds, and what would change it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.arguments.options import MODEL, Json, PlanFile, WithCluster, WithProfile
from meshwright.arguments.targets import cluster_of, load_target
from meshwright.costmodel.explain.utilisation import Utilisation, step_flops
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.verify import check
from meshwright.ir.profile.profile_store import load_profile
from meshwright.ir.text.terminal import Terminal
from meshwright.tools.explain.answers import Answer
from meshwright.tools.explain.saving import PlannedSaves
from meshwright.tools.explain.show import Explanation, as_data, heading, point, render

if TYPE_CHECKING:
    from meshwright.ir.graph.graph import Graph
    from meshwright.tools.explain.whatif import Asked


EXAMPLES = (f"meshwright explain plan.json --model {MODEL}",)


def command(
    plan_file: PlanFile,
    target: Annotated[
        str | None,
        typer.Option("--model", help="also price and search again: module:callable or hf:..."),
    ] = None,
    cluster: WithCluster = None,
    profile: WithProfile = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", help="with --model: seconds of each search")
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Tell where time and memory go, what binds the plan, and what would change it."""
    if target is None and (profile or cluster):
        raise typer.BadParameter("--cluster and --profile need --model")
    plan = plan_io.load(plan_file)
    found, console = Explanation.of(plan), Terminal()
    if not as_json:
        console.print(render(found), highlight=False)
    machines = _known(plan, cluster)
    saves = PlannedSaves.of(plan, machines) if machines is not None else None
    if saves is not None and not as_json:
        console.print(heading("What saving costs"))
        console.print(point(saves.text), highlight=False)
    answers: list[Answer] = []
    use, shown = Utilisation.kept(plan), Terminal(quiet=as_json)
    asked = _asked(plan, target, cluster, profile, time_limit_s) if target is not None else None
    if asked:
        flops = step_flops(asked.graph(plan.global_batch_size))
        use = Utilisation.on(plan, cluster_of(plan, cluster), flops)
    if use:
        shown.print(heading("How much of the devices is used"))
        shown.print(point(use.sentence()), highlight=False)
    if asked:
        shown.print(heading("What would change it, priced and searched again"))
        with Terminal(stderr=True).status("pricing and searching again ..."):
            for answer in asked.answers():
                answers.append(answer)
                shown.print(point(answer.text), highlight=False)
    if as_json:
        used = {"mfu": use.mfu(found.facts.step_s)} if use else {}
        saving = {"saving": asdict(saves)} if saves is not None else {}
        print(json.dumps(as_data(found, answers) | used | saving, indent=2))


def _known(plan: Plan, cluster: str | None) -> Cluster | None:
    """The plan's cluster, if it is given or a preset, and has all of the plan's devices."""
    try:
        found = cluster_of(plan, cluster)
    except PlanError:
        if cluster is not None:
            raise
        return None
    return found if found.num_devices >= plan.cluster.num_devices else None


def _asked(
    plan: Plan, target: str, cluster: str | None, profile: Path | None, time_limit_s: float
) -> "Asked":
    from meshwright.tools.explain.whatif import Asked  # torch is loaded only where it is needed

    machines = cluster_of(plan, cluster)
    known = load_profile(profile) if profile else None
    return Asked.of(plan, machines, _graphs(plan, target, time_limit_s), known, time_limit_s)


def _graphs(plan: Plan, target: str, time_limit_s: float) -> "Callable[[int], Graph]":
    from meshwright.ir.trace.trace import trace
    from meshwright.ir.trace.within import traced_within

    model = load_target(target, meta=True)

    def traced(batch: int) -> "Graph":
        with traced_within(time_limit_s):
            graph = trace(
                model.model, model.example_inputs, model.loss_fn, global_batch_size=batch,
                kernels=plan.kernels, precision=plan.precision,
            )  # fmt: skip
        if batch == plan.global_batch_size:
            check(plan, graph)
        return graph

    return traced
