"""`make demo`: search, run and check a GPT-2 on four local processes, against one process.

The main process profiles, searches and prints the verdict; it starts itself again as the four
ranks (`worker`) and as the single process (`single`), so that each has its own memory.
"""

import argparse
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console
from rich.table import Table

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import render
from meshwright.ir.profile import measured
from meshwright.ir.profile.profile import Profile
from meshwright.ir.text.terminal import Terminal
from meshwright.ir.text.units import size
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.kernels import kernels_for
from meshwright.planner.search.search import search
from meshwright.profiling.measure_local import measure_local
from meshwright.profiling.profiling import profile
from meshwright.running.display import ShownStep, read_records, recording
from meshwright.running.disturbance import mark, others_share, pace_s
from meshwright.running.launch import where
from meshwright.running.ranks import run_ranks
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.record import run_dir
from meshwright.runtime.world import children

if TYPE_CHECKING:
    from torch import nn

STEPS, BATCH, SEQUENCE, RANKS, LEARNING_RATE = 30, 8, 256, 4, 3e-4
MINUTES = 1.0
"""Of profiling: enough for the blocks that most plans are made of."""
FOLDER = Path("demo-run")
TEXT = Path(__file__).parent / "data" / "founding_texts.txt"
TOLERANCE = 1e-3
"""Largest relative difference of a loss: float32 sums in another order, over 30 AdamW steps."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for."""

    role: Literal["main", "worker", "single"]
    minutes: float
    quiet: bool


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What the machine did while the plan ran."""

    pace: float
    """What fixed work took, over what it took while the machine was measured."""
    others: float
    """Share of the machine that others used."""

    @property
    def widens(self) -> float:
        """By how much more a step may be off, relative to what is measured."""
        return abs(1.0 / self.pace - 1.0) + self.others

    def __str__(self) -> str:
        times = f"fixed work takes {self.pace:.2f} times as long as then"
        return f"{times}, and others used {self.others:.0%} of its cores"


def build_model() -> "nn.Module":
    """A GPT-2 of about 10M parameters on bytes, random weights, no dropout so losses compare."""
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=320, n_layer=8, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Windows of the text at seeded random places, as byte tokens; the same on every rank."""
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - SEQUENCE, (BATCH,), generator=generator)
        ids = torch.stack([data[s : s + SEQUENCE] for s in starts])
        yield {"input_ids": ids, "labels": ids}


def worker(options: DemoOptions) -> int:
    """One rank of the parallel run."""
    plan = plan_io.load(FOLDER / "plan.json")
    job = compile_job(
        build_model(), plan, optimizer="adamw", lr=LEARNING_RATE, run_dir=FOLDER / "run"
    )
    show = job.parts.rank == 0 and not options.quiet
    title = f"{RANKS} processes ({where(job.device, job.plan)})"
    with recording(title, STEPS, BATCH * SEQUENCE, show=show) as recorder:
        for batch in batches():
            recorder.start()
            recorder.stop(float(job.step(batch)))
    recorder.write(FOLDER / f"parallel_rank{job.parts.rank}.jsonl")
    job.close()
    return 0


def single(options: DemoOptions) -> int:
    """The same training in one process, in plain PyTorch."""
    model = build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    show = not options.quiet
    with recording("1 process", STEPS, BATCH * SEQUENCE, show=show) as recorder:
        for batch in batches():
            recorder.start()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.stop(loss.item())
    recorder.write(FOLDER / "single.jsonl")
    return 0


def measure_model(
    graph: Graph, cluster: Cluster, options: DemoOptions, console: Console
) -> Profile | None:
    """The model's own blocks on this machine, as far as the time goes; None if there is none.

    What the machine does with products and copies in general, `measure_local` knows in seconds;
    what it does with these blocks is not their sum. Measured anew each time, since predictions are
    of how fast the machine is now.
    """
    if options.minutes <= 0:
        return None
    path = FOLDER / "profile.db"
    path.unlink(missing_ok=True)
    with warnings.catch_warnings(record=True) as left_out:
        found = profile(
            graph, cluster, precision="fp32", optimizer="adamw", minutes=options.minutes,
            path=path, progress=not options.quiet,
        )  # fmt: skip
    counts = f"{len(found.blocks)} blocks, {len(found.collectives)} collectives"
    console.print(f"wrote {path}: {counts}")
    for note in left_out:
        console.print(f"note: {note.message}", style="dim")
    return found


def verdict(plan: Plan, meanwhile: Meanwhile, console: Console) -> bool:
    """Prints losses side by side and predictions beside measurements; True if the runs agree."""
    parallel = read_records(FOLDER / "parallel_rank0.jsonl")
    alone = read_records(FOLDER / "single.jsonl")
    table = Table("step", "4 processes", "1 process", "relative difference", title="Losses")
    worst = 0.0
    for many, one in zip(parallel, alone, strict=True):
        difference = abs(many.loss - one.loss) / abs(one.loss)
        worst = max(worst, difference)
        if many.step % 5 == 0 or many.step == STEPS - 1:
            table.add_row(
                str(many.step), f"{many.loss:.6f}", f"{one.loss:.6f}", f"{difference:.1e}"
            )
    console.print(table)
    console.print(_predictions(plan, meanwhile, parallel, alone))
    fell = parallel[-1].loss < parallel[0].loss
    agree = worst <= TOLERANCE and fell
    console.print(
        f"{'PASS' if agree else 'FAIL'}: largest relative difference of a loss {worst:.1e} "
        f"(allowed {TOLERANCE:.0e}); loss {parallel[0].loss:.3f} -> {parallel[-1].loss:.3f}",
        style="bold green" if agree else "bold red",
    )
    return agree


def _predictions(
    plan: Plan, meanwhile: Meanwhile, parallel: list[ShownStep], alone: list[ShownStep]
) -> Table:
    assert plan.predicted
    own = plan.predicted.error_band
    table = Table(
        "", "predicted", "measured", "error", title="Predicted against measured",
        caption=f"The band of a step is the plan's +-{own:.0%}, and {meanwhile.widens:.0%} for "
        f"what the machine did since it was measured: {meanwhile}. One process computes on all "
        "cores with threads; processes that share these cores add messages and no arithmetic, so "
        "1x is the most to hope for here.",
    )  # fmt: skip
    step_s = statistics.median(record.step_s for record in parallel[2:])
    predicted_s, band = plan.predicted.step_s, own + meanwhile.widens
    error = predicted_s / step_s - 1
    table.add_row(
        "step time",
        f"{predicted_s:.3f} s +-{band:.0%}",
        f"{step_s:.3f} s",
        f"{error:+.0%}, {'inside' if abs(error) <= band else 'outside'}",
    )
    memory = [found.memory for found in measured.load_run(FOLDER / "run")]
    added = max(found.resident_peak_bytes - found.resident_start_bytes for found in memory)
    memories = [stage.memory for stage in plan.predicted.stages]
    expected = max(memory.used_bytes - memory.parameters_bytes for memory in memories)
    table.add_row(
        "memory that training adds, worst rank",
        size(expected),
        size(added),
        f"{expected / added - 1:+.0%}",
    )
    single_s = statistics.median(record.step_s for record in alone[2:])
    table.add_row("speed against one process", "", f"{single_s / step_s:.2f}x", "")
    return table


def main(options: DemoOptions) -> int:
    """Profile, search, run both ways, compare."""
    console = Terminal()
    FOLDER.mkdir(exist_ok=True)
    console.rule("1. measure this machine, profile the model on it, and search")
    before_s = pace_s()
    cluster = measure_local(RANKS)
    kernels, wins = kernels_for([cluster])
    graph = trace(
        build_model(), next(batches()), global_batch_size=BATCH, kernels=kernels, wins=wins
    )
    plan = search(
        graph, cluster, precision="fp32", optimizer="adamw", progress=not options.quiet,
        profile=measure_model(graph, cluster, options, console),
    )  # fmt: skip
    plan_io.save(plan, FOLDER / "plan.json")
    console.print(render(plan))
    write_stage_sources(graph, plan)
    console.print(f"wrote {FOLDER}/plan.json and {FOLDER}/stages/*.py")
    run_dir.clear(FOLDER / "run")
    quiet = ["--quiet"] * options.quiet
    measured_s, start = (before_s + pace_s()) / 2, mark()
    console.rule(f"2. train {STEPS} steps on {RANKS} processes")
    if code := run_ranks(RANKS, "meshwright.demo", "worker", *quiet):
        console.print(f"FAIL: the parallel run ended with exit code {code}", style="bold red")
        return 1
    others = others_share(start, mark())
    meanwhile = Meanwhile(pace_s() / measured_s, others)
    console.rule(f"3. train the same {STEPS} steps in one process")
    command = [sys.executable, "-m", "meshwright.demo", "single", *quiet]
    if code := children.run(command):
        console.print(f"FAIL: the single process ended with exit code {code}", style="bold red")
        return 1
    console.rule("4. verdict")
    return 0 if verdict(plan, meanwhile, console) else 1


def write_stage_sources(graph: Graph, plan: Plan) -> None:
    """The generated stage modules, for review."""
    from meshwright.codegen.emit.emit import write_sources
    from meshwright.codegen.lower.lower import lower

    programs = [p for stage in plan.stages for p in lower(graph, plan, stage.devices[0])]
    write_sources(programs, FOLDER / "stages")


def parse(arguments: list[str]) -> DemoOptions:
    """Exits with 2 if they are none of ours."""
    parser = argparse.ArgumentParser("python -m meshwright.demo", description=__doc__)
    parser.add_argument(
        "role", nargs="?", choices=("main", "worker", "single"), default="main",
        help="the demo itself, or what it starts",
    )  # fmt: skip
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="of profiling the model (%(default)g); 0: none",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return DemoOptions(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank does not outlive its launcher
        children.die_with_parent()
    asked = parse(sys.argv[1:])
    raise SystemExit({"main": main, "worker": worker, "single": single}[asked.role](asked))
