"""`meshwright run`: be one rank of a launcher, or start all ranks on this machine."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.arguments.targets import load_callable, load_target
from meshwright.ir.errors import NonFinite
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.tokens import tokens_per_sample
from meshwright.ir.profile.measured import StepKind
from meshwright.ir.trace.loss_module import Batch, nested_batch
from meshwright.running.display import StepDisplay, recording
from meshwright.running.logs import MetricLog, parse_kinds
from meshwright.running.ranks import run_ranks
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.saver import Saver
from meshwright.runtime.record import run_dir
from meshwright.runtime.step.finite import check_policy
from meshwright.runtime.world.launcher import STARTED
from meshwright.runtime.world.leaving import warnings_change_nothing
from meshwright.runtime.world.patience import HANG_S


@dataclass(frozen=True)
class SavingChoice:
    """Where and how often a run saves, and whether it may go on from what is there."""

    folder: Path
    every: str | None = None
    keep: int = 1
    resume: bool = False


def where(device: torch.device, plan: Plan) -> str:
    """Which device and which backend this run took: `cpu, gloo`; and for what the plan is, if for
    something else."""
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    kind = plan.cluster.device_kind
    other = f"; the plan is for {plan.cluster.name}" if kind not in (None, device.type) else ""
    return f"{device}, {backend}{other}"


def train(
    plan_file: Path,
    target: str,
    *,
    steps: int,
    data: str | None,
    learning_rate: float,
    output: Path | None,
    trace: bool,
    as_json: bool,
    log: str = "",
    check: bool | None = None,
    tune: bool = False,
    saving: SavingChoice | None = None,
    on_nonfinite: str = "stop",
    hang_s: float = HANG_S,
) -> None:
    """Takes `steps` optimizer steps of TARGET under the plan, or starts the ranks that do.

    `output` is the run directory: the plan, and per rank steps, measurements and a trace. A job
    that saves takes what is left of the steps.
    """
    plan = plan_io.load(plan_file)
    kinds = parse_kinds(log)
    output = output or Path("runs") / plan.hash[:12]
    if "RANK" not in os.environ:
        run_dir.prepare(output, plan, 0)
        if plan.world_size > 1:
            raise SystemExit(run_ranks(plan.world_size, "meshwright", *sys.argv[1:]))
    found = load_target(target)
    job = compile_job(
        found.model, plan, loss_fn=found.loss_fn, example_inputs=found.example_inputs,
        lr=learning_rate, run_dir=output, check=check, tune=tune,
        on_nonfinite=check_policy(on_nonfinite), hang_s=hang_s,
    )  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    tokens = plan.global_batch_size * tokens_per_sample(plan)
    rows = run_dir.steps_path(output, rank)
    if STARTED in os.environ:
        warnings_change_nothing()
    title, show = f"training ({where(job.device, job.plan)})", rank == 0 and not as_json
    with (
        MetricLog(job, output, kinds) as metrics,
        recording(title, steps, tokens, show=show) as recorder,
        _saver(job, saving, lambda: recorder.write(rows)) as saver,
    ):
        cut_off = False
        recorder.begin_at(job.state.step)
        wanted = step_kinds(max(0, steps - job.state.step), trace=trace)
        try:
            source = saver.batches(batches(plan, data))
            with job.failures.guard():  # also between steps
                _steps(job, wanted, source, output, recorder, metrics, saver)
            saver.finish()
        except RuntimeError as error:
            if saver.left or not saver.asked_before(error):
                raise
            saver.give_up()
            cut_off = True
            # Ranks that got a signal to end a moment before have left this one's step.
        recorder.write(rows)
        job.close()
        if rank == 0 and (saver.left or cut_off):
            _say_ended(saver, job, output)
        elif rank == 0 and job.state.step < steps:
            _say(f"the data ended after {job.state.step} of {steps} steps")
    if cut_off and saver.asked_by is not None:
        raise SystemExit(128 + saver.asked_by)
    if rank == 0:
        report(output, steps, trace=trace, as_json=as_json)


def _saver(job: Job, saving: SavingChoice | None, at_last: Callable[[], None]) -> Saver:
    """Of a run; without a folder it only has all ranks leave after one step."""
    if saving is None:
        return Saver(job, None, at_last=at_last)
    return Saver(
        job, saving.folder, every=saving.every, keep=saving.keep, resume=saving.resume or None,
        at_last=at_last,
    )  # fmt: skip


def _say_ended(saver: Saver, job: Job, output: Path) -> None:
    assert saver.asked_by is not None
    saved = "; all of it is saved" * (saver.saves and saver.left)
    _say(
        f"ended by {saver.asked_by.name} after {job.state.step} steps; {output} holds what they "
        f"took{saved}"
    )


def _say(text: str) -> None:
    print(f"meshwright: {text}", file=sys.stderr, flush=True)


def _steps(
    job: Job,
    kinds: list[StepKind],
    source: Iterator[Any],
    output: Path,
    recorder: StepDisplay,
    metrics: MetricLog,
    saver: Saver,
) -> None:
    """Steps of the given kinds, or as many as there are batches, until the job is to leave. Those
    that it goes back from are taken again, with the next batches."""
    ahead: list[Any] = []
    last = job.state.step + len(kinds)
    while kinds:
        kind = kinds.pop(0)
        waited = time.perf_counter()
        batch = ahead.pop() if ahead else next(source, None)
        if batch is None:
            return
        if job.reads_ahead:
            ahead.append(next(source, None))
        recorder.start()
        data_s = time.perf_counter() - waited
        try:
            loss = float(take(job, kind, batch, output, *ahead))
        except NonFinite as error:
            if job.on_nonfinite != "back":
                raise
            saver.go_back(error)
            recorder.begin_at(job.state.step)
            again: list[StepKind] = ["timed"] * (last - job.state.step - len(kinds) - 1)
            kinds[:0] = [*again, kind]
            continue
        recorder.stop(loss, kind)
        metrics.step(loss, step_s=time.perf_counter() - waited, data_s=data_s)
        if saver.stepped():
            return


def step_kinds(steps: int, *, trace: bool) -> list[StepKind]:
    """A first step to warm up, timed ones, then one that counts tensors and one for the trace.

    Timed steps go first where there are few.
    """
    last: list[StepKind] = ["tracked", "traced"] if trace else ["tracked"]
    last = last[: max(steps - 2, 0)]
    timed: list[StepKind] = ["timed"] * (steps - 1 - len(last))
    first: list[StepKind] = ["warm-up"]
    return first + timed + last if steps else []


def take(
    job: Job, kind: StepKind, batch: Batch, output: Path, next_batch: Batch | None = None
) -> Tensor:
    """One step of the given kind."""
    match kind:
        case "tracked":
            return job.track_memory(batch, next_batch=next_batch)
        case "traced":
            path = run_dir.trace_path(output, job.parts.rank)
            return job.trace_step(batch, path, next_batch=next_batch)
        case _:
            return job.step(batch, next_batch=next_batch)


def report(output: Path, steps: int, *, trace: bool, as_json: bool) -> None:
    """Says what the run left, and what it could not leave."""
    if as_json:
        print(run_dir.steps_path(output, 0).read_text(), end="")
        return
    print(f"wrote {output}: compare it with `meshwright compare {output}/plan.json {output}`")
    if trace and steps < 4:
        print(f"no trace: the step that is traced comes after 3 others, and --steps is {steps}")


def batches(plan: Plan, data: str | None) -> Iterator[Any]:
    """Global batches, the same on every rank: from `module:callable`, else random ones."""
    if data is None:
        yield from _random_batches(plan)
        return
    source: Iterable[Any] = load_callable(data, "--data")()
    yield from source


def _random_batches(plan: Plan) -> Iterator[Any]:
    """Random inputs of the planned shapes; integers below 2, so that they are legal everywhere."""
    generator = torch.Generator().manual_seed(0)
    while True:
        batch = {}
        for spec in plan.model.inputs:
            dtype = getattr(torch, spec.dtype)
            if dtype.is_floating_point:
                batch[spec.name] = torch.randn(spec.shape, generator=generator, dtype=dtype)
            else:
                batch[spec.name] = torch.randint(0, 2, spec.shape, generator=generator).to(dtype)
        yield nested_batch(batch)
