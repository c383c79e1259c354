"""A dry run for people: what ranks of each kind hold, beside what was predicted."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from meshwright.costmodel.start_up import StartUp
from meshwright.ir.text.units import size
from meshwright.runtime.checkpoint.node_memory import STATES, STATES_WITH_NEIGHBOUR
from meshwright.tools.dry.run import DryRank, DryRun

ROWS = 24
"""Kinds of ranks that are listed, those that hold most first."""


def show(done: DryRun, console: Console) -> None:
    """Prints the table and one line about the whole."""
    table = Table(box=SIMPLE_HEAD, title="Dry run: tensors at their peak", title_justify="left",
                  pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    for name in ("ranks", "stages"):
        table.add_column(name)
    for name in ("params", "grads", "optim.", "rest", "peak", "predicted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(done.ranks, key=lambda rank: -rank.memory.peak_bytes)
    for rank in order[:ROWS]:
        table.add_row(*_row(rank))
    console.print(table)
    if len(order) > ROWS:
        console.print(f"... and {len(order) - ROWS} more kinds of ranks, which hold less")
    console.print(
        f"{done.world_size} ranks of {len(done.ranks)} kinds stepped in {done.seconds:.1f} s, "
        f"{done.transfers} pieces sent per micro-batch",
        highlight=False,
    )
    console.print(_start(done.start), highlight=False)
    console.print(_in_memory(done), highlight=False)


def _start(start: StartUp) -> str:
    """What ranks open before the first step."""
    if start.world_size == 1:
        return "one rank, which opens no connection"
    return (
        f"at start {start.groups:,} groups, {start.rank_groups} of a rank at most; "
        f"{start.sockets:,} sockets of a rank at most (rank {start.busiest_rank}), "
        f"{start.store_sockets:,} of the job's store; {start.store_operations:,} operations of "
        f"the store; about {start.seconds:.1f} s (estimate)"
    )


def _in_memory(done: DryRun) -> str:
    """What `meshwright run --elastic` keeps on the host, beside what the job itself has there."""
    state = max(
        (r.memory.parameters_bytes + r.memory.optimizer_bytes for r in done.ranks), default=0
    )
    return (
        f"run --elastic keeps the newest state in host memory: at most "
        f"{size(STATES_WITH_NEIGHBOUR * state)} for each rank of a node, {size(STATES * state)} on "
        "one node or with --memory-saves machine; where there is no room, none is kept"
    )


def _row(rank: DryRank) -> tuple[str, ...]:
    held = rank.memory
    predicted = "-" if rank.predicted_bytes is None else size(rank.predicted_bytes)
    more = f" (+{len(rank.ranks) - 1} alike)" if len(rank.ranks) > 1 else ""
    return (
        f"{rank.ranks[0]}{more}", ", ".join(map(str, rank.stages)),
        *(size(n) for n in (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes,
                            held.rest_bytes + held.inputs_bytes, held.peak_bytes)),
        predicted, "-" if rank.error is None else f"{rank.error:+.1%}",
    )  # fmt: skip
