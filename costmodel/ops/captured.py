"""A device whose CPU launches graphs, and not operators one by one (`Stage.capture`)."""

from dataclasses import replace

from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.cluster.launching import Launching

LAUNCH_S = 2.5e-6
"""Of the CPU, for a graph whose nodes follow each other; NODE_S for each node beside. NVIDIA of
CUDA 12.6 on Ampere and later: "Constant Time Launch for Straight-Line CUDA Graphs" (2024)."""
NODE_S = 1e-9
BESIDE = 4
"""Operators that a call launches by itself beside its graph, forward and backward each: views of
what it made, and clearing sums of gradients; assumption."""


def capturing(device: DeviceType) -> DeviceType:
    """Returns the device as it runs blocks that are recorded: forward and backward of each are one
    launch, whatever they call and send. A CPU is as it was."""
    if device.kind == "cpu":
        return device
    each = LAUNCH_S + BESIDE * device.overhead_s
    launching = Launching(block_forward_s=each, block_backward_s=each)
    return replace(device, overhead_s=NODE_S, launching=launching)
