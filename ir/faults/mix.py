"""How often devices fail, and by what: counts of a long run that was published."""

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class FaultCause:
    """What interrupted a run, and how often."""

    name: str
    count: int
    takes_node: bool
    """Whether the node is gone until somebody has seen to it."""


@dataclass(frozen=True, slots=True)
class FaultMix:
    """Interruptions of a run of so many devices over so many hours."""

    source: str
    num_devices: int
    hours: float
    causes: tuple[FaultCause, ...]

    @property
    def count(self) -> int:
        """Interruptions in all."""
        return sum(cause.count for cause in self.causes)

    @property
    def takes_node(self) -> float:
        """The share of interruptions that take a node."""
        return sum(cause.count for cause in self.causes if cause.takes_node) / self.count

    def between_s(self, num_devices: int) -> float:
        """Mean seconds from one interruption of a job of so many devices to the next."""
        return self.hours * HOUR_S * self.num_devices / self.count / num_devices


LLAMA_3 = FaultMix(
    source="The Llama 3 Herd of Models, table 5 (arXiv 2407.21783); which causes take the node is "
    "our reading",
    num_devices=16_384,
    hours=54 * 24.0,
    causes=(
        FaultCause("faulty GPU", 148, takes_node=True),
        FaultCause("GPU HBM3 memory", 72, takes_node=True),
        FaultCause("software bug", 54, takes_node=False),
        FaultCause("network switch or cable", 35, takes_node=False),
        FaultCause("host maintenance", 32, takes_node=True),
        FaultCause("GPU SRAM memory", 19, takes_node=True),
        FaultCause("GPU system processor", 17, takes_node=True),
        FaultCause("NIC", 7, takes_node=True),
        FaultCause("NCCL watchdog time-outs", 7, takes_node=False),
        FaultCause("silent data corruption", 6, takes_node=True),
        FaultCause("GPU thermal interface and sensor", 6, takes_node=True),
        FaultCause("SSD", 3, takes_node=True),
        FaultCause("power supply", 3, takes_node=True),
        FaultCause("others", 10, takes_node=True),
    ),
)  # fmt: skip
"""Unplanned ones: one each 3.1 hours."""
