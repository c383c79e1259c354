"""`meshwright run`: be one rank under torchrun, or start torchrun on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.display import recording
from meshwright.ir import plan_io
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import Plan
from meshwright.runtime.job import compile as compile_job
from meshwright.targets import load_target


def torchrun(world_size: int, *arguments: str) -> int:
    """Starts `python -m ARGUMENTS` on `world_size` local ranks; the exit code of the job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size), "-m", *arguments]
    threads = {"OMP_NUM_THREADS": "1"}  # ranks share the cores; torchrun would choose it too
    return subprocess.run(command, check=False, env=threads | os.environ).returncode


def where(device: torch.device) -> str:
    """Which device and which backend this run took: `cpu, gloo`."""
    backend = dist.get_backend() if dist.is_initialized() else "no process group"
    return f"{device}, {backend}"


def train(
    plan_file: Path,
    target: str,
    *,
    steps: int,
    data: str | None,
    learning_rate: float,
    output: Path,
    as_json: bool,
) -> None:
    """Takes `steps` optimizer steps of TARGET under the plan, or starts the ranks that do."""
    if "RANK" not in os.environ and (world := plan_io.load(plan_file).world_size) > 1:
        raise SystemExit(torchrun(world, "meshwright", *sys.argv[1:]))
    plan = plan_io.load(plan_file)
    found = load_target(target)
    job = compile_job(
        found.model, plan, loss_fn=found.loss_fn, example_inputs=found.example_inputs,
        lr=learning_rate,
    )  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    tokens = plan.global_batch_size * samples_length(plan)
    with recording(
        f"training ({where(job.device)})", steps, tokens, show=rank == 0 and not as_json
    ) as recorder:
        for batch in islice(batches(plan, data), steps):
            recorder.start()
            loss = float(job.step(batch))
            recorder.stop(loss)
    recorder.write(output / f"steps_rank{rank}.jsonl")
    if as_json and rank == 0:
        print((output / "steps_rank0.jsonl").read_text(), end="")
    job.close()


def samples_length(plan: Plan) -> int:
    """Tokens per sample: the second dim of an integer input, else 1 (then rates are samples)."""
    shape = plan.model.inputs[0].shape
    return shape[1] if plan.model.inputs[0].dtype.startswith("int") and len(shape) > 1 else 1


def batches(plan: Plan, data: str | None) -> Iterator[Any]:
    """Global batches, the same on every rank: from `module:callable`, else random ones."""
    if data is None:
        yield from _random_batches(plan)
        return
    module, _, name = data.partition(":")
    try:
        source: Iterable[Any] = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise PlanError(f"--data {data!r} is not a module:callable that loads: {error}") from error
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
        numbered = all(name.isdecimal() for name in batch)
        yield tuple(batch.values()) if numbered else batch
