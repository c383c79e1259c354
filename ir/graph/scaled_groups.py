"""Products of runs of rows in 8-bit floats: what an expert's product is where a precision has those
of linear layers so, each expert as a layer of its own.

Scales go with an expert: of each row and column of what one multiplies, or one for its rows and one
for its matrix. Tokens that travel to their experts so are rounded as on one process. Both operands
are e4m3, gradients too, as torch's kernel takes no other.

On a GPU of the ninth generation that is torch's kernel, otherwise a loop over runs: a product of
the same rounded values in float32 or wider.
"""

from typing import NamedTuple

import torch

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.cast_groups import (
    LARGEST,
    LEAST,
    NARROW,
    POWERS,
    Runs,
    cast_columns,
    cast_rows,
)
from meshwright.ir.graph.float8 import MULTIPLE
from meshwright.ir.graph.grouped import PairGroups, grouped, grouped_outer
from meshwright.ir.launch import TAKEN, triton, why_torch
from meshwright.ir.precision import Scaling
from meshwright.ir.torch_private import SCALED_GROUPED_MM

CAPABILITY = "9.0"
"""Of the GPUs that torch's kernel is for."""


class _Cast(NamedTuple):
    """An operand of a product in 8-bit floats."""

    values: torch.Tensor
    back: torch.Tensor
    """What its values are multiplied by to be as they were: float32."""


def fits(widths: tuple[int, ...]) -> bool:
    """Whether the kernel takes matrices of such sizes."""
    return not any(width % MULTIPLE for width in widths)


def check_device(device: torch.device) -> None:
    """PlanError for a GPU that torch's kernel is not for: its products over rows fail on others."""
    if device.type != "cuda":
        return
    if SCALED_GROUPED_MM is None or triton is None:
        lacks = "torch" if SCALED_GROUPED_MM is None else "Triton"
        raise PlanError(
            f"grouped products of 8-bit floats, which the plan's experts have, are of torch and "
            f"Triton, and there is no such {lacks}: nearest is precision bf16"
        )
    major, minor = torch.cuda.get_device_capability(device)
    check_capability(f"{major}.{minor}" if not torch.version.hip else "of AMD")


def check_capability(capability: str, name: str = "") -> None:
    """PlanError for a GPU, of a name that is known, whose capability of CUDA is another than that
    of torch's kernel."""
    if capability != CAPABILITY:
        found = f"{capability} of {name}" if name else capability
        raise PlanError(
            "grouped products of 8-bit floats, which the plan's experts have, are for GPUs of "
            f"capability {CAPABILITY} (H100, H200), not {found}: nearest is precision bf16, "
            "or bf16 for their modules, such as fp8-rowwise, *.experts=bf16"
        )


def product(
    rows: torch.Tensor, weight: torch.Tensor, groups: PairGroups, scaling: Scaling
) -> torch.Tensor:
    """[pairs, n] of rows [pairs, m] by each expert's matrix of [E, m, n]."""
    if not scaling:
        return grouped(rows, weight, groups)
    by_kernel = groups.ends is not None
    TAKEN["scaled_groups", "" if by_kernel else why_torch(rows) or "runs are looped over"] += 1
    if groups.ends is not None and len(rows):
        left, right = _rows(rows, groups, scaling), _matrices(weight, scaling)
        return _kernel(left, right, groups.ends)
    made = rows.new_empty(len(rows), weight.shape[2])
    for expert, run in _runs(groups):
        if run.stop > run.start:
            made[run] = _one(rows[run], weight[expert], scaling)
    return made


def outer(
    left: torch.Tensor, right: torch.Tensor, groups: PairGroups, scaling: Scaling
) -> torch.Tensor:
    """[E, m, n] of rows [pairs, m] and [pairs, n]: their product over each expert's run."""
    if not scaling or not len(left):
        return grouped_outer(left, right, groups)
    if groups.ends is not None:
        runs, ends = _apart(groups.ends)
        first, second = (_columns(x, groups, runs, scaling) for x in (left, right))
        turned = _Cast(second.values.t(), second.back)
        return _kernel(first, turned, ends)
    made = left.new_empty(groups.experts, left.shape[1], right.shape[1])
    for expert, run in _runs(groups):
        made[expert] = _one(left[run].t(), right[run], scaling)
    return made


def _runs(groups: PairGroups) -> list[tuple[int, slice]]:
    found, start = [], 0
    for expert, count in enumerate(groups.counts):
        found.append((expert, slice(start, start + count)))
        start += count
    return found


def _kernel(left: _Cast, right: _Cast, ends: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = SCALED_GROUPED_MM(
        left.values, right.values, left.back, right.back, offs=ends, out_dtype=torch.bfloat16
    )
    return made


def _one(left: torch.Tensor, right: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """[m, n] of [m, k] and [k, n]."""
    if not left.shape[1]:
        return left.new_zeros(left.shape[0], right.shape[1])
    wide = torch.promote_types(left.dtype, torch.float32)
    narrow = []
    for x, dim in ((left, 1), (right, 0)):
        over = (dim,) if scaling == "row" else (0, 1)
        scale = scale_of(x.abs().amax(over, keepdim=True), scaling)
        narrow.append(_Cast((x * scale).to(NARROW).to(wide), 1 / scale))
    first, second = narrow
    found = first.values @ second.values
    return found.mul_(first.back).mul_(second.back).to(left.dtype)


def scale_of(most: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Returns what values are multiplied by, float32, of their largest: that comes to the largest
    8-bit float; by row it is a power of two, which rounds nothing."""
    found = (LARGEST / most.clamp(min=LEAST)).float()
    if scaling == "row":
        found = found.view(torch.int32).bitwise_and(POWERS).view(torch.float32)
    return found


def _rows(rows: torch.Tensor, groups: PairGroups, scaling: Scaling) -> _Cast:
    """Rows [pairs, m], with a factor for each."""
    given = None if scaling == "row" else _of_runs(rows, groups).index_select(0, groups.owners)
    return _Cast(*cast_rows(rows, given))


def _of_runs(rows: torch.Tensor, groups: PairGroups) -> torch.Tensor:
    """A scale for each expert's run of rows [E]."""
    most = groups.most_of(torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True))
    return scale_of(most.squeeze(1), "tensor")


def _matrices(weight: torch.Tensor, scaling: Scaling) -> _Cast:
    """Weights [E, m, n], each column in one piece of memory; a factor for each [E, n]."""
    experts, m, n = weight.shape
    given = None
    if scaling == "tensor":
        given = scale_of(torch.linalg.vector_norm(weight, torch.inf, (1, 2)), scaling)
    if weight.stride(1) == 1:
        given = None if given is None else given.repeat_interleave(n)
        made, back = cast_rows(weight.transpose(1, 2).reshape(experts * n, m), given)
    else:
        each = torch.arange(experts, device=weight.device)
        runs = Runs(each * m, each * m + m, each * (m * n))
        flat = weight.reshape(experts * m, n)
        made, back = cast_columns(flat, runs, m, experts * m * n, given)
    return _Cast(made.view(experts, n, m).transpose(1, 2), back.view(experts, n))


def _apart(ends: torch.Tensor) -> tuple[Runs, torch.Tensor]:
    """Runs that each go to a multiple, and where they end there."""
    counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    wide = (counts + (MULTIPLE - 1)).div(MULTIPLE, rounding_mode="floor") * MULTIPLE
    apart = wide.cumsum(0, dtype=torch.int32)
    return Runs(ends - counts, ends, apart - wide), apart


def _columns(rows: torch.Tensor, groups: PairGroups, runs: Runs, scaling: Scaling) -> _Cast:
    """Rows [pairs, m] turned, [m, places], with a factor for each expert and column [E * m]."""
    given = None if scaling == "row" else _of_runs(rows, groups)
    length = -(-len(rows) // MULTIPLE) * MULTIPLE + MULTIPLE * groups.experts
    made, back = cast_columns(rows, runs, length, rows.shape[1] * length, given)
    return _Cast(made.view(rows.shape[1], length), back.reshape(-1))
