"""`by_method(model, plan, samples)`: a job of a plan that trains by a method of its own."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.methods import Awaited, MethodRun, SummedTerms, method, method_findings
from meshwright.ir.comm.by_store import of_all
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.loss_module import LossFn
from meshwright.ir.trace.trace import trace
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint import manifest, parts
from meshwright.runtime.checkpoint.boxes import Boxed, copy, to_fill, to_write
from meshwright.runtime.checkpoint.checkpoint import stored_tensors, told
from meshwright.runtime.checkpoint.files import write
from meshwright.runtime.checkpoint.manifest import Manifest
from meshwright.runtime.checkpoint.piece_files import InFolder
from meshwright.runtime.checkpoint.shard_boxes import ShardBox
from meshwright.runtime.job.handshake import (
    check_identity,
    check_model,
    check_world,
    identity,
    share_plan,
)
from meshwright.runtime.world.patience import HANG_S
from meshwright.runtime.world.world import join, rank


class Counted:
    """Sums over all ranks, and what they send."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Of the tensors that this rank has summed."""

    def __call__(self, x: Tensor) -> Awaited:
        """Starts the sum of a tensor in place."""
        self.nbytes += x.nbytes
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return _SummedAlone()
        work: Awaited = dist.all_reduce(x, async_op=True)
        return work


class _SummedAlone:
    """Of one rank."""

    def wait(self) -> object:
        """There is nothing to wait for."""
        return None


class MethodJob:
    """One rank of a job that trains by a method; all ranks call the same methods."""

    def __init__(
        self, plan: Plan, model: nn.Module, run: MethodRun, sums: Counted, first: int, *,
        owns_world: bool,
    ) -> None:  # fmt: skip
        """`first`: the number of this rank's first sample."""
        self.plan, self.model, self.run, self.sums = plan, model, run, sums
        self.steps = 0
        """Iterations so far."""
        self._first, self._owns_world = first, owns_world

    def step(self) -> Tensor:
        """Takes one iteration over all samples; what it makes smaller, the same on every rank."""
        value = self.run.step()
        if not torch.isfinite(value).all():
            raise PlanError(f"iteration {self.steps} ended in {float(value)}: its settings are off")
        self.steps += 1
        return value

    @property
    def described(self) -> tuple[SummedTerms, ...]:
        """What ranks sum in one iteration, by the method's formula."""
        chosen = self.plan.method
        assert chosen is not None
        return method(chosen.form).describe(self.model, chosen.settings)

    def sync_to(self, model: nn.Module | None = None) -> None:
        """Gives a module (default: `job.model`) the parameters as they are."""
        found = (model or self.model).state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in self.run.shared.items():
                if name in found:
                    found[name].copy_(value)

    def save(self, folder: str | Path, *, keep: int = 1) -> Path:
        """Writes a checkpoint that a plan of any number of ranks goes on from; all ranks call it,
        and the `keep` newest stay."""
        path, own = Path(folder), rank()
        partial = path / f"step-{self.steps:08d}.partial"
        alone = self.plan.world_size == 1
        with told(alone, f"{path}: the checkpoint cannot be written"):
            if own == 0:
                folders.begin(path, self.steps)
        name = f"part-{own:05d}.safetensors"
        with told(alone, f"{partial}: the checkpoint could not be written"):
            written = parts.write(to_write(self._boxes(self.run.shared)), partial / name)
        everyone = of_all((name, *written, {}))
        with told(alone, f"{partial}: the checkpoint could not be written"):
            if own == 0:
                files = {name: file for name, file, _, _ in everyone}
                made = Manifest(
                    self.steps, self.plan.model.fingerprint, [], {}, files,
                    stored_tensors(everyone), {},
                )  # fmt: skip
                write(partial / manifest.NAME, manifest.dumps(made))
                folders.finish(path, partial, keep)
        return path / f"step-{self.steps:08d}"

    def load(self, folder: str | Path) -> None:
        """Goes on from the newest checkpoint in `folder`; all ranks call it."""
        with told(self.plan.world_size == 1, str(folder)):
            path = next(iter(folders.candidates(Path(folder))))
            folders.check(path)
            found = manifest.read(path)
            if found.model != self.plan.model.fingerprint:
                raise PlanError(f"{path} is a checkpoint of another model or number of samples")
            for name, part in found.files.items():
                parts.check(path / name, part)
            room = {
                key.removeprefix("shared/"): torch.zeros(x.shape, dtype=torch.float64)
                for key, x in found.tensors.items() if key.startswith("shared/")
            }  # fmt: skip
            fills = to_fill([self._boxes(room)], found.tensors)
            for number, read in parts.read_all(InFolder(path), [fill.wanted for fill in fills]):
                copy(fills[number], read)
        self.run.load(room)
        self.steps = found.step

    def close(self) -> None:
        """Leaves the job; the last call."""
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()

    def _boxes(self, shared: Mapping[str, Tensor]) -> dict[str, Boxed]:
        found = {f"shared/{name}": _box(x, 0, len(x), rank() == 0) for name, x in shared.items()}
        total = self.plan.global_batch_size
        for name, x in self.run.of_samples.items():
            found[f"samples/{name}"] = _box(x, self._first, total, True)
        return found


def _box(x: Tensor, first: int, rows: int, writes: bool) -> Boxed:
    """A tensor that lies in a larger one from some row on."""
    rest = tuple(x.shape[1:])
    box = ShardBox((first, *(0 for _ in rest)), tuple(x.shape), (0,) * x.ndim)
    return Boxed((rows, *rest), ((box, x),), writes)


def by_method(
    model: nn.Module,
    plan: Plan | None,
    samples: Sequence[Tensor],
    *,
    loss_fn: LossFn | None = None,
    hang_s: float = HANG_S,
) -> MethodJob:
    """Called by every rank, under torchrun; alone if the plan is for one.

    The plan names a method (`with_method`), which has `samples` [all, ...] from beginning to end;
    each rank keeps those that the plan's `batch_shares` give it. Ranks other than 0 may pass no
    plan. PlanError if the method does not train such a model, or the plan names none.
    """
    joined = join(plan.world_size if plan is not None else 2, "cpu", hang_s)
    plan = share_plan(plan)
    check_world(plan)
    if plan.method is None:
        raise PlanError("the plan names no method: mw.with_method(plan, 'admm'), or mw.compile")
    for finding in method_findings(plan):
        raise PlanError(str(finding))
    if isinstance(samples, Mapping) or len(samples) != 2:
        keys = f" of {', '.join(map(str, samples))}" if isinstance(samples, Mapping) else ""
        raise PlanError(
            f"samples are a {type(samples).__name__}{keys}, {len(samples)} in all; a method takes "
            "what its model reads and the targets; nearest is a tuple (x, y)"
        )
    if len(samples[0]) != plan.global_batch_size:
        raise PlanError(
            f"{len(samples[0])} samples are given, and the plan is for {plan.global_batch_size}, "
            "which a method has all at once"
        )
    graph = trace(model, tuple(samples), loss_fn, precision=plan.precision)
    check_model(plan, graph)
    check_identity(identity(plan, graph, model))
    sums, chosen = Counted(), plan.method
    run = method(chosen.form).build(model, chosen.settings, sums)
    shares, own = plan.stages[0].batch_shares, plan.stages[0].devices.index(rank())
    first = [0, *accumulate(shares)][own]
    mine = [x[first : first + shares[own]] for x in samples]
    run.begin(mine, plan.global_batch_size)
    return MethodJob(plan, model, run, sums, first, owns_world=joined)
