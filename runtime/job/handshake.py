"""Ranks agree on plan, model and code before they start, or refuse to start."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import meshwright
from meshwright.ir.comm.by_store import from_first, judged
from meshwright.ir.errors import MismatchError
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Kind
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.finding import few
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision
from meshwright.ir.text.plain_text import shown
from meshwright.runtime.job.same_weights import ADVICE, weights_digest


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal on all ranks."""

    plan: str
    model: str
    code: str
    """Sources of the package, and the version of torch."""
    tune: str = "False"
    """Whether the job tunes while it trains."""
    weights: str = ""
    """Values of the module that each rank has built."""


@cache
def code_hash() -> str:
    """Of the sources as this process first read them: it goes on with what it has imported."""
    digest = sha256(torch.__version__.encode())
    root = Path(meshwright.__file__).parent
    for folder in ("ir", "forms", "codegen", "runtime"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def identity(plan: Plan, graph: Graph, model: nn.Module, tune: bool = False) -> Identity:
    return Identity(
        plan_io.content_hash(plan), graph.fingerprint, code_hash(), str(tune), weights_digest(model)
    )


def share_plan(plan: Plan | None) -> Plan:
    """Rank 0's plan, for ranks that have none; ranks that have one keep theirs, to be checked."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if plan is None:
            raise MismatchError("there is no plan: pass one to compile()")
        return plan
    # Only what rank 0 says is read; a large plan takes a while to write.
    said = plan if dist.get_rank() == 0 else None
    text = from_first(plan_io.dumps(said) if said is not None else None)
    if text is None:
        raise MismatchError("rank 0 has no plan: pass one to compile() there at least")
    return plan if plan is not None else plan_io.loads(text, check_hash=False)


def check_world(plan: Plan) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != plan.world_size:
        raise MismatchError(
            f"the plan is for {plan.world_size} ranks, this job has {world}; start it with "
            f"torchrun --nproc-per-node and --nnodes that make {plan.world_size}, or search again"
        )


def check_model(plan: Plan, graph: Graph) -> None:
    if plan.model.fingerprint != graph.fingerprint:
        raise MismatchError(
            f"the plan is for model {plan.model.name!r} ({plan.model.fingerprint[:12]}), this "
            f"model is another or has changed ({graph.fingerprint[:12]}); search a plan for it"
        )
    wanted = precision(plan.precision).all_in
    found = {t.dtype for t in graph.tensors.values() if t.kind is Kind.PARAMETER}
    own = {dtype for dtype in found if getattr(torch, dtype).is_floating_point}
    widest = max(own, key=lambda dtype: DTYPE_BYTES[dtype], default=wanted)
    if wanted and DTYPE_BYTES[widest] < DTYPE_BYTES[wanted]:
        raise MismatchError(
            f"the plan's precision is {plan.precision}, and all parameters of the model are in "
            f"{', '.join(sorted(own))}: make it {wanted} (model.to(torch.{wanted})) before the "
            "search, or search with another precision"
        )


@contextmanager
def told_of_another_model(plan: Plan, model: nn.Module) -> Iterator[None]:
    """Turns what a model raises that cannot be traced with a plan's inputs into a MismatchError,
    where the plan is for a model of another name."""
    try:
        yield
    except Exception as error:
        given = type(model).__name__
        if given == plan.model.name:
            raise
        names = ", ".join(spec.name for spec in plan.model.inputs)
        raise MismatchError(
            f"the plan is for model {plan.model.name!r} of {plan.model.num_parameters:,} "
            f"parameters, this is a {given!r} of "
            f"{sum(p.numel() for p in model.parameters()):,}, which cannot be traced with the "
            f"plan's inputs ({names}): {shown(str(error))}; search a plan for it"
        ) from error


def check_identity(own: Identity) -> None:
    """Raises MismatchError on every rank if one differs from rank 0."""
    if problem := judged(own, _unlike):
        raise MismatchError(problem)


def _unlike(everyone: Sequence[Identity]) -> str:
    """Which ranks differ from rank 0, and in what."""
    first = everyone[0]
    for field in fields(Identity):
        wanted = getattr(first, field.name)
        others = [r for r, found in enumerate(everyone) if getattr(found, field.name) != wanted]
        if others:
            where = f"{field.name} differs from rank 0's on rank {few(others)[1:-1]}: "
            if field.name == "weights":
                return f"{where}{ADVICE}"
            return (
                f"{where}{getattr(everyone[others[0]], field.name)[:16]} instead of {wanted[:16]}"
            )
    return ""
