"""What software makes of a device: what the CPU takes to keep it at work, and what casting
operands of narrow products moves."""

from dataclasses import dataclass, fields

from pydantic import ConfigDict

from meshwright.ir.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """Seconds of the CPU; they run beside the GPU's, and a block takes the longer of both."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    collective_s: float = 0.0
    """Per collective: its checks, streams, events and launch."""
    check_s: float = 0.0
    """Per collective and further rank of its group, where ranks compare what they are about to
    send before they send it."""
    block_forward_s: float = 0.0
    """Per block and micro-batch, beside its ops."""
    block_backward_s: float = 0.0
    split_forward_s: float = 0.0
    """The same again for a block that communicates on a model axis."""
    split_backward_s: float = 0.0
    waits: bool = False
    """The CPU waits for each kernel before it launches the next: nothing runs beside anything."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0.0 <= value <= 1.0:
                raise PlanError(f"launching: {item.name} is {value}; it must be from 0 to 1 second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """Bytes that move per value of an operand of an 8-bit product with one scale a tensor, or of
    its result's gradient, where kernels cast and turn at once and what a norm makes is cast by
    that; weights are cast once a step, which is not counted."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    operand: float
    result: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0.0 <= value <= 64.0:
                raise PlanError(f"casting: {item.name} is {value}; it must be from 0 to 64 bytes")
