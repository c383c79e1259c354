"""Random ops whose numbers do not depend on how the batch is laid out.

Every sample has its own generator, seeded by (job seed, step, block, op, global sample index), so
data parallelism, micro-batches and pipeline stages draw the same masks as one process. A dim that
is split over tp draws per tp coordinate: its masks differ from those of another tp size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import PRELUDE, TOTALS
from meshwright.ir.graph.operators import operator
from meshwright.ir.kernels.bias_gelu import bias_gelu
from meshwright.ir.kernels.bias_gelu.dropout import gelu_dropout as fused_dropout
from meshwright.ir.kernels.bias_gelu.dropout import masks
from meshwright.ir.trace.still import Still


def seed_of(comm: Comm, key: str, sample: int, axes: tuple[str, ...]) -> int:
    """The seed of one sample's numbers in one op; `axes` are those whose coordinate matters."""
    where = [f"{axis}={comm.coordinates[axis]}" for axis in axes]
    # What the totals of a batch are computed from is drawn again in the prelude.
    block = PRELUDE if comm.block == TOTALS else comm.block
    text = "/".join([str(comm.seed), str(comm.step), block, key, str(sample), *where])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def dropout(
    comm: Comm,
    input: Tensor,
    p: float,
    key: str,
    dim: int = -1,
    outer: int = 1,
    per_sample: int = 1,
    axes: tuple[str, ...] = (),
) -> Tensor:
    """Dropout of a value whose dim `dim` holds, in `outer` sections, `per_sample` elements of each
    sample; -1: no dim of it belongs to samples."""
    if not comm.training or p == 0:
        return input
    if p == 1:
        return input * 0
    if comm.still:
        return input / (1 - p)
    seeds = _seeds(comm, input, key, dim, outer * per_sample, axes)
    if not seeds:
        return input
    return input * masks(input, p, seeds, dim, outer, per_sample) / (1 - p)


def _seeds(
    comm: Comm, x: Tensor, key: str, dim: int, per_sample: int, axes: tuple[str, ...]
) -> list[int]:
    """One for each sample of x."""
    if dim < 0:
        return [seed_of(comm, key, -1, axes)]
    samples = range(comm.sample_offset, comm.sample_offset + x.shape[dim] // per_sample)
    return [seed_of(comm, key, sample, axes) for sample in samples]


def gelu_dropout(
    comm: Comm,
    x: Tensor,
    bias: Tensor,
    tanh: bool,
    p: float,
    key: str,
    dim: int = -1,
    outer: int = 1,
    per_sample: int = 1,
    axes: tuple[str, ...] = (),
) -> Tensor:
    """Dropout of GELU of x with its bias, with the masks of `dropout`; see there."""
    if comm.still and comm.training:
        return dropout(comm, bias_gelu(x, bias, tanh), p, key)
    seeds = _seeds(comm, x, key, dim, outer * per_sample, axes) if comm.training else []
    made: Tensor = (
        fused_dropout(x, bias, tanh, p, seeds, dim, outer, per_sample)
        if seeds
        else bias_gelu(x, bias, tanh)
    )
    return made


_DEFAULT = Lock()
"""Threads have one default generator together: simulated ranks take turns with it."""


@contextmanager
def with_seed(device: torch.device, seed: int) -> Iterator[None]:
    """The default generators start from `seed` inside, and are as before afterwards."""
    devices = [device] if device.type != "cpu" else []
    kind = device.type if devices else "cuda"
    with _DEFAULT, torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


def attention(
    comm: Comm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    name: str,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    per_sample: int = 0,
    axes: tuple[str, ...] = (),
) -> Tensor:
    """Attention with fused dropout, one sample (`per_sample` rows of dim 0; 0: all) at a time."""

    def attend(start: int, stop: int) -> Tensor:
        mask = attn_mask
        if mask is not None and mask.ndim == query.ndim and mask.shape[0] > 1:
            mask = mask[start:stop]
        return scaled_dot_product_attention(
            query[start:stop], key[start:stop], value[start:stop], mask, dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    rows, kept = query.shape[0], 1 - dropout_p
    if not comm.training or comm.still or not rows:
        dropout_p = 0.0
        return attend(0, rows) / kept if comm.still and comm.training else attend(0, rows)
    parts = []
    for start in range(0, rows, per_sample or rows):
        sample = comm.sample_offset + start // per_sample if per_sample else -1
        with with_seed(query.device, seed_of(comm, name, sample, axes)):
            parts.append(attend(start, start + (per_sample or rows)))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def seeded(
    comm: Comm, target: str, op_key: str, axes: tuple[str, ...] = (), **arguments: object
) -> object:
    """A random op without a form of its own: its numbers depend on where the batch is split."""
    # Names that Python keeps for itself end with a line in emitted code: `from_`.
    arguments = {name.removesuffix("_"): x for name, x in arguments.items()}
    if comm.still:
        with Still():
            return operator(target)(**arguments)
    sample = comm.sample_offset if "dp" in axes else -1
    if not comm.training and "train" in arguments:
        arguments["train"] = False
    with with_seed(comm.device, seed_of(comm, op_key, sample, axes)):
        return operator(target)(**arguments)
