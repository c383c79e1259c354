"""Memory that a process of a job takes before it has any tensors: measured in processes of its own.

    python -m meshwright.runtime.profiling.process DEVICE STORE RANK WORLD BEFORE

is one of them; it prints what it has found as JSON.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.heap import keep_freed_memory
from meshwright.ir.profile.profile import MemoryRecord
from meshwright.runtime.job.job import Job
from meshwright.runtime.record.resident import resident_bytes
from meshwright.runtime.world.children import dying_with_parent

_IMPORTED = Job
"""A training process has imported what it needs."""

_PATIENCE_S = 300.0
_ROUNDED = 200


def process_records(device: torch.device) -> list[MemoryRecord]:
    """`process`: with all that training imports, after a tiny step; `process_group`: what the job's
    communicator adds; `group`: what each further one adds."""
    world = 1 if device.type == "cuda" else 2
    before = _used(device) if device.type == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", __name__, str(device), store]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(before)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                preexec_fn=dying_with_parent(),
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            answers = [rank.communicate(timeout=_PATIENCE_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        last = next(text for rank, (_, text) in zip(ranks, answers, strict=True) if rank.returncode)
        raise MeshwrightError(f"measuring a process failed: {last.strip().splitlines()[-1:]}")
    found = json.loads(answers[0][0].splitlines()[-1])
    return [
        MemoryRecord(name=name, value=value, unit="ratio" if value < 100 else "bytes")
        for name, value in found.items()
    ]


def _used(device: torch.device) -> int:
    """Resident bytes; on a GPU those in use, by whom ever, that are not this process's tensors."""
    if device.type == "cpu":
        return resident_bytes()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _train(device: torch.device) -> None:
    """A tiny step maps the libraries that training uses."""
    layer = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    torch.autograd.backward(layer(torch.randn(64, 64, device=device)).sum())
    optimizer.step()


def _rounding() -> float:
    """Bytes that CUDA's allocator takes for tensors of many sizes, relative to those asked for."""
    before = torch.cuda.memory_allocated()
    held = [torch.empty(1000 * (i + 1), dtype=torch.uint8, device="cuda") for i in range(_ROUNDED)]
    return (torch.cuda.memory_allocated() - before) / sum(x.nbytes for x in held)


def main(name: str, store: str, rank: int, world: int, before: int) -> None:
    device = torch.device(name)
    torch.set_num_threads(1)
    if device.type == "cpu":
        keep_freed_memory()
    _train(device)
    found: dict[str, float] = {"process": _used(device) - before}
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    dist.all_reduce(torch.zeros(1, device=device))
    joined = _used(device) - before
    found["process_group"] = max(0, joined - int(found["process"]))
    dist.all_reduce(torch.zeros(1, device=device), group=dist.new_group())
    found["group"] = max(0, _used(device) - before - joined)
    if device.type == "cuda":
        found["allocator_rounding"] = _rounding()
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
