"""Noise of each sample from a seed of its own, whatever ranks and micro-batches hold the sample.

On model axes every rank draws the whole noise of its samples and takes its part of it.
"""

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.seeds import default_generator, seed_of
from meshwright.ir.graph.noise import NORMAL
from meshwright.ir.graph.operators import operator
from meshwright.ir.trace.still import DEVIATION, QUANTILE, Still


def noise(
    comm: Comm,
    size: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    key: str,
    dim: int = -1,
    outer: int = 1,
    per_sample: int = 1,
) -> Tensor:
    """Numbers of this size, whose dim `dim` holds, in `outer` sections, `per_sample` elements of
    each sample; -1: no dim of it belongs to samples, and all ranks and micro-batches have the same.
    """
    if comm.still:
        constant = DEVIATION if kind == NORMAL else QUANTILE
        return torch.full(tuple(size), constant, dtype=dtype, device=comm.device)
    generator = torch.Generator(comm.device)

    def draw(slab: tuple[int, ...], sample: int) -> Tensor:
        generator.manual_seed(seed_of(comm, key, sample))
        made = torch.empty(slab, dtype=dtype, device=comm.device)
        return (
            made.normal_(generator=generator)
            if kind == NORMAL
            else made.uniform_(generator=generator)
        )

    if dim < 0:
        return draw(tuple(size), -1)
    count = size[dim] // (outer * per_sample)
    if not count:
        return torch.empty(size, dtype=dtype, device=comm.device)
    slab = (*size[:dim], outer, per_sample, *size[dim + 1 :])
    first = comm.sample_offset
    drawn = [draw(slab, sample) for sample in range(first, first + count)]
    return torch.stack(drawn, dim + 1).view(size)


def each_sample(
    comm: Comm,
    target: str,
    op_key: str,
    cut: tuple[str, ...],
    per_sample: int = 1,
    first: int = 0,
    **arguments: object,
) -> Tensor:
    """A random op of one sample at a time, each with a seed of its own. The arguments called `cut`,
    and what comes out, have `per_sample` rows of each along dim 0, from the replica's sample
    `first` on; if there are none, it runs once.
    """
    op = operator(target)
    if comm.still:
        with Still():
            constant: Tensor = op(**arguments)
        return constant
    tensors = [x for name in cut if isinstance(x := arguments[name], Tensor)]
    if not tensors:
        with default_generator(comm.device) as generator:
            generator.manual_seed(seed_of(comm, op_key, -1))
            whole: Tensor = op(**arguments)
        return whole
    made = []
    with default_generator(comm.device) as generator:
        for i in range(tensors[0].shape[0] // per_sample):
            own = {
                name: x.narrow(0, i * per_sample, per_sample)
                for name, x in zip(cut, tensors, strict=True)
            }
            generator.manual_seed(seed_of(comm, op_key, comm.sample_offset + first + i))
            made.append(op(**{**arguments, **own}))
    return torch.cat(made) if made else op(**arguments)


def drop(comm: Comm, input: Tensor, noise: Tensor, p: float, alpha: bool) -> Tensor:
    """Dropout by this noise, of channels or with SELU's least value; none in evaluation."""
    if not comm.training:
        return input
    if comm.still:  # as torch's own, which draws whether an element stays
        noise = torch.full_like(noise, float(QUANTILE < 1 - p))
    made: Tensor = torch.ops.meshwright.drop(input, noise, p, alpha)
    return made


def random_slope(comm: Comm, input: Tensor, noise: Tensor, lower: float, upper: float) -> Tensor:
    """A leaky ReLU whose slopes are random; in evaluation they are their mean."""
    if not comm.training:
        return leaky_relu(input, (lower + upper) / 2)
    made: Tensor = torch.ops.meshwright.random_slope(input, noise, lower, upper)
    return made
