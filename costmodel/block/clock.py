"""Adds up the times of a run of ops: kernels, communication, and the CPU that dispatches them."""

from dataclasses import dataclass, field
from typing import Protocol

from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.ops.compute import OpTime
from meshwright.costmodel.ops.formulas import SOURCE_BAND
from meshwright.ir.cluster.device import DeviceType, Source
from meshwright.ir.cluster.launching import Launching


class Told(Protocol):
    """Communication, to be added to a clock by the links of a site."""

    def tell(self, clock: "BlockSums", site: StageSite) -> None: ...


Tape = list[OpTime | Told]


@dataclass
class BlockSums:
    """Sums over the ops of one block.

    A GPU works off what the CPU has queued. Where its kernels are longer than the CPU needs to
    dispatch them, dispatch hides; where they are shorter, the GPU waits for the CPU. So a block
    takes the longer of the two sums, not both, and not the sum of the longer of each op: the queue
    evens out. Blocks are whole layers, so the queue between blocks makes little difference.
    """

    forward_s: float = 0.0
    """Kernels and communication; on a CPU dispatch too."""
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    comm_forward_s: float = 0.0
    comm_backward_s: float = 0.0
    forward_dispatch_s: float = 0.0
    input_dispatch_s: float = 0.0
    weight_dispatch_s: float = 0.0
    calls: int = 0
    """Collectives on model axes."""
    scattered_bytes: int = 0
    """Of whole values that forward reduce-scatters read."""
    tail_s: float = 0.0
    """Of the forward, what came after all that a backward needs was there (`need`); settled: by
    which a forward is shorter that stops there."""
    comm_tail_s: float = 0.0
    """Of it, communication."""
    tail_dispatch_s: float = 0.0
    behind_s: float = 0.0
    """What a forward leaves to the device once the CPU has dispatched all of it; settled."""
    uncertain_s: float = 0.0
    comm_uncertain_s: float = 0.0
    """Of it, the part of communication."""
    sources: set[Source] = field(default_factory=set)

    @classmethod
    def of(cls, tape: Tape, site: StageSite) -> "BlockSums":
        """What a walk's clock would say at another site of the same axes and device; settled."""
        clock = cls()
        for told in tape:
            if isinstance(told, OpTime):
                clock.add(told)
            else:
                told.tell(clock, site)
        clock.settle(site.device)
        return clock

    def add(self, time: OpTime) -> None:
        self.forward_s += time.forward_s
        self.backward_input_s += time.backward_input_s
        self.backward_weight_s += time.backward_weight_s
        self.forward_dispatch_s += time.forward_dispatch_s
        self.input_dispatch_s += time.input_dispatch_s
        self.weight_dispatch_s += time.weight_dispatch_s
        self.tail_s += time.forward_s
        self.tail_dispatch_s += time.forward_dispatch_s
        self.uncertain_s += time.total_s * time.band
        self.sources.add(time.source)

    def need(self) -> None:
        """Note that a backward needs what the forward has made last."""
        self.tail_s = self.comm_tail_s = self.tail_dispatch_s = 0.0

    def communicate(self, forward_s: float, backward_s: float, band: float) -> None:
        self.tail_s += forward_s
        self.comm_tail_s += forward_s
        self.forward_s += forward_s
        self.comm_forward_s += forward_s
        self.backward_input_s += backward_s
        self.comm_backward_s += backward_s
        self.uncertain_s += band * (forward_s + backward_s)
        self.comm_uncertain_s += band * (forward_s + backward_s)

    def call(self, launching: Launching, forward: int, backward: int, ranks: int) -> None:
        """Add what the CPU takes to start so many collectives of a group."""
        each = launching.collective_s + launching.check_s * (ranks - 1)
        self.forward_dispatch_s += forward * each
        self.tail_dispatch_s += forward * each
        self.input_dispatch_s += backward * each
        self.calls += forward + backward

    def settle(self, device: DeviceType, *, of_block: bool = True) -> None:
        """Add the time that the device waits for the CPU; the backward's parts share theirs."""
        launching = device.launching
        if launching and of_block:
            self._launch(launching)
        waits = launching is not None and launching.waits
        busy_forward = 0.0 if waits else self.forward_s
        forward = max(0.0, self.forward_dispatch_s - busy_forward)
        dispatch = self.input_dispatch_s + self.weight_dispatch_s
        busy = 0.0 if waits else self.backward_input_s + self.backward_weight_s
        backward = max(0.0, dispatch - busy)
        part = self.input_dispatch_s / dispatch if dispatch else 0.0
        self.behind_s = max(0.0, busy_forward - self.forward_dispatch_s)
        early_s = self.forward_s - self.tail_s
        early_dispatch_s = self.forward_dispatch_s - self.tail_dispatch_s
        early_s += max(0.0, early_dispatch_s - (0.0 if waits else early_s))
        self.forward_s += forward
        self.tail_s = self.forward_s - early_s
        self.backward_input_s += backward * part
        self.backward_weight_s += backward * (1.0 - part)
        self.uncertain_s += SOURCE_BAND[device.source] * (forward + backward)
        self.forward_dispatch_s = self.input_dispatch_s = self.weight_dispatch_s = 0.0
        self.tail_dispatch_s = 0.0
        self.calls = 0

    def _launch(self, launching: Launching) -> None:
        if not self.forward_dispatch_s:
            return  # nothing ran
        self.forward_dispatch_s += launching.block_forward_s
        self.input_dispatch_s += launching.block_backward_s * bool(self.input_dispatch_s)
        if self.calls:
            self.forward_dispatch_s += launching.split_forward_s
            self.input_dispatch_s += launching.split_backward_s
