"""A block, its links and devices."""

from dataclasses import replace

from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.ops.overheads import Overheads
from meshwright.costmodel.stage.sync import BlockTimes
from meshwright.ir.cluster.device import Link
from meshwright.ir.presets import device

# 100 kB/s and nothing else: an all-gather of n bytes over two takes n / 200,000 s.
LINK = Link(name="slow", bandwidth_bytes_per_s=1e5, latency_s=0.0)


TWO = (Level(2, LINK),)


NO_OVERHEADS = Overheads(
    0.0, 0.0, 0.0, replace(device("a100-80"), memory_bandwidth_bytes_per_s=1e15)
)


BLOCK = BlockTimes(
    forward_s=2.0, tensor_forward_s=0.0, again_s=0.0, input_s=2.0, weight_s=2.0, accumulate_s=0.0,
    split_s=0.0, tensor_backward_s=0.0,
)  # fmt: skip
