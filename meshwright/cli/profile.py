"""`meshwright profile`: measures this machine for a model on a cluster, into a file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from meshwright.arguments.options import MODEL, Json
from meshwright.arguments.targets import load_cluster, load_target
from meshwright.ir.errors import PlanError
from meshwright.ir.precision import USUAL
from meshwright.ir.profile.outliers import outliers
from meshwright.ir.profile.profile import COMPILED, Profile, Timing
from meshwright.ir.text.terminal import Terminal
from meshwright.ir.text.units import size

if TYPE_CHECKING:
    from meshwright.ir.cluster.cluster import Cluster
    from meshwright.ir.graph.graph import Graph

_ROWS = 20
"""Blocks that are listed; all are in the file."""
_ODD = 8
"""Disturbed measurements that are listed."""


EXAMPLES = (f"meshwright profile --model {MODEL} -c local:4 -b 64 -m 5 -o profile.db",)


def command(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the profile; what it has is not measured again")
    ] = Path("profile.db"),
    target: Annotated[
        str | None,
        typer.Option("--model", help="module:callable or hf:ConfigClass{json}; else no blocks"),
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="local:4, h100-sxm:8x8 or cluster.yaml")
    ] = "local:2",
    minutes: Annotated[
        float | None, typer.Option("--minutes", "-m", help="the most that it takes")
    ] = None,
    precision: str = USUAL,
    optimizer: str = "adamw",
    global_batch_size: Annotated[int | None, typer.Option("--global-batch", "-b")] = None,
    constraint: Annotated[
        list[str] | None, typer.Option("--pin", help="measure only for plans with tp=2, say")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="blocks as torch.compile makes them too")
    ] = False,
    first: Annotated[
        bool,
        typer.Option("--first", help="only say what to measure first, for a model's best plans"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine: blocks of a model, ops, collectives, memory."""
    from meshwright.ir.trace.trace import trace  # torch is loaded only where it is needed
    from meshwright.planner.problem.kernels import kernels_for
    from meshwright.profiling.profiling import profile

    graph, machines = None, load_cluster(cluster)
    if target is not None:
        found = load_target(target, meta=True)
        names, wins = kernels_for([machines])  # as a search will put them in
        graph = trace(
            found.model,
            found.example_inputs,
            found.loss_fn,
            global_batch_size=global_batch_size,
            precision=precision,
            kernels=names,
            wins=wins,
        )
    if first:
        _show_first(graph, machines, precision, optimizer, constraint or [], output, as_json)
        return
    measured = profile(
        graph,
        machines,
        precision=precision,
        optimizer=optimizer,
        path=output,
        minutes=minutes,
        constraints=tuple(constraint or ()),
        compiled=compiled,
        progress=not as_json,
    )
    if as_json:
        odd = [asdict(one) for one in outliers(measured)]
        print(json.dumps(summary(measured) | {"file": str(output), "outliers": odd}))
    else:
        show(measured, Terminal())
        print(f"wrote {output} ({measured.fingerprint})")


def _show_first(
    graph: "Graph | None",
    machines: "Cluster",
    precision: str,
    optimizer: str,
    constraints: Sequence[str],
    known: Path,
    as_json: bool,
) -> None:
    from meshwright.ir.profile.profile_store import load_profile
    from meshwright.profiling.first import measure_first

    if graph is None:
        raise PlanError("--first says what to measure for plans of a model: name it with --model")
    found = measure_first(
        graph, machines, precision=precision, optimizer=optimizer, constraints=constraints,
        profile=load_profile(known) if known.exists() else None,
    )  # fmt: skip
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    table = Table(title="What to measure first", caption="Relative errors that the best plans "
                  "state, when this and all above it have been measured.")  # fmt: skip
    for name in ("measurement", "band before", "after"):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row(one.measured, f"{one.before:.1%}", f"{one.after:.1%}")
    console = Terminal()
    if found:
        console.print(table)
    else:
        console.print("No measurement narrows what the best plans state.")


def summary(profile: Profile) -> dict[str, object]:
    """How much there is of each kind."""
    return {
        "machine": str(profile.machine),
        "fingerprint": profile.fingerprint,
        "blocks": len(profile.blocks),
        "ops": len(profile.ops),
        "collectives": len(profile.collectives),
        "copies": len(profile.copies),
        "memory": len(profile.memory),
        "optimizers": len(profile.optimizers),
    }


def show(profile: Profile, console: Console) -> None:
    """Prints the blocks, and how much there is of everything."""
    if profile.blocks:
        console.print(_blocks(profile))
    if len(profile.blocks) > _ROWS:
        console.print(f"... and {len(profile.blocks) - _ROWS} more blocks")
    counts = {k: v for k, v in summary(profile).items() if isinstance(v, int)}
    console.print(f"{profile.machine}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    odd = outliers(profile)
    if odd:
        console.print(f"{len(odd)} of them look disturbed:")
    for one in odd[:_ODD]:
        console.print(f"- {one.what}: {_time(one.time)}, {one.why}", markup=False)
    if len(odd) > _ODD:
        console.print(f"... and {len(odd) - _ODD} more (--json has all)")


def _blocks(profile: Profile) -> Table:
    table = Table(title="Blocks without communication")
    for name in ("block", "samples", "tp", "forward", "backward", "kept", "workspace"):
        table.add_column(name, overflow="fold", no_wrap=name == "block")
    order = sorted(profile.blocks.values(), key=lambda r: (r.pattern, r.tp, r.samples))
    for record in order[:_ROWS]:
        table.add_row(
            record.pattern + " (compiled)" * record.key.endswith(COMPILED),
            str(record.samples),
            str(record.tp),
            _time(record.forward),
            _time(record.backward),
            size(record.saved_bytes),
            size(record.workspace_bytes),
        )
    return table


def _time(timing: Timing) -> str:
    return f"{timing.median_s * 1e3:,.3f} ms +-{timing.spread:.0%}"
