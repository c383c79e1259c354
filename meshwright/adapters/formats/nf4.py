"""NF4: four bits that number the quantiles of a normal distribution, scaled to the largest value of
each block (Dettmers et al. 2023)."""

import torch
from torch import Tensor

from meshwright.adapters.formats import Encoded, WeightFormat
from meshwright.ir.graph.quantised import nf4_values


def _encode(values: Tensor) -> Encoded:
    """Takes the nearest of the sixteen values."""
    scale = values.abs().amax(-1)
    scale = scale.where(scale > 0, scale.new_ones(()))
    table = nf4_values(values.dtype, values.device)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize((values / scale.unsqueeze(-1)).contiguous(), between)
    return Encoded(codes, scale, None)


FORMAT = WeightFormat(bits=4, encode=_encode, zeros=False)
