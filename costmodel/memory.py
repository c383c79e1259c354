"""Training state per rank: parameters, gradients, optimizer state and their sharding by ZeRO."""

from dataclasses import dataclass
from math import ceil

from meshwright.forms.updates import update


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one rank that live as long as the job."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int


def training_state(
    stored_bytes: int, trained_bytes: int, *, optimizer: str, zero: int, dp_shard: int
) -> State:
    """State of a rank that would hold `stored_bytes` of parameters and buffers without ZeRO.

    Rajbhandari et al. 2020: stage 1 shards the optimizer state over dp_shard, 2 also the gradients,
    3 also the parameters.
    """
    part = ceil(trained_bytes / dp_shard)
    kept = trained_bytes if zero < 3 else part
    return State(
        parameters_bytes=stored_bytes - trained_bytes + kept,
        gradients_bytes=trained_bytes if zero < 2 else part,
        optimizer_bytes=update(optimizer).copies * (trained_bytes if zero < 1 else part),
    )


def optimizer_traffic(trained_bytes: int, optimizer: str, *, zero: int, dp_shard: int) -> float:
    """Bytes that one optimizer step moves on a rank."""
    return update(optimizer).passes * (ceil(trained_bytes / dp_shard) if zero else trained_bytes)
