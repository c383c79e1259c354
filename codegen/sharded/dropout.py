"""Random ops whose numbers do not depend on how a batch or its samples are laid out.

An element that may be dropped has a number of its own: that of its place in the whole batch, under
a key of (job seed, step, block, op). So data parallelism, micro-batches, pipeline stages and splits
of samples draw the same masks as one process. An op without a form of its own has a seed.
"""

from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.seeds import default_generator, numbers_here, seed_of
from meshwright.ir.graph.operators import operator
from meshwright.ir.kernels.bias_gelu import bias_gelu
from meshwright.ir.kernels.bias_gelu.dropout import gelu_dropout as fused_dropout
from meshwright.ir.random.dropout import dropout as dropped
from meshwright.ir.trace.still import Still

IN_ORDER = (-1,), (1,)
"""Sizes and strides of numbers that lie as the elements do."""


def dropout(
    comm: Comm,
    input: Tensor,
    p: float,
    key: str,
    per_sample: int = 0,
    first: int = 0,
    sizes: tuple[int, ...] = IN_ORDER[0],
    strides: tuple[int, ...] = IN_ORDER[1],
) -> Tensor:
    """Dropout of a value of whose samples each has `per_sample` numbers, 0 if no dim belongs to
    samples. In dims of `sizes` its elements have numbers `strides` apart, from `first` on."""
    if not comm.training or p == 0:
        return input
    if p == 1:
        return input * 0
    if comm.still:
        return input / (1 - p)
    here = numbers_here(comm, key, per_sample)
    return dropped(input, p, here.key, first + here.first, sizes, strides, here.held, per_sample)


def gelu_dropout(
    comm: Comm,
    x: Tensor,
    bias: Tensor,
    tanh: bool,
    p: float,
    key: str,
    per_sample: int = 0,
    first: int = 0,
    sizes: tuple[int, ...] = IN_ORDER[0],
    strides: tuple[int, ...] = IN_ORDER[1],
) -> Tensor:
    """Dropout of GELU of x with its bias, with the numbers of `dropout`; see there."""
    if comm.still or not comm.training:
        return dropout(comm, bias_gelu(x, bias, tanh), p, key)
    here = numbers_here(comm, key, per_sample)
    made: Tensor = fused_dropout(
        x, bias, tanh, p, here.key, first + here.first, sizes, strides, here.held, per_sample
    )
    return made


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
    with default_generator(comm.device) as generator:
        generator.manual_seed(seed_of(comm, op_key, sample, axes))
        return operator(target)(**arguments)
