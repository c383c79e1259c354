"""Training state per rank: parameters, gradients, optimizer state, and what of it is split."""

from dataclasses import dataclass
from math import ceil

from meshwright.forms.sync.exchange import Exchange
from meshwright.ir.errors import PlanError

OPTIMIZER_COPIES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1}
"""How many values of optimizer state there are per parameter value, in the parameter's dtype."""

_PASSES = {"adamw": 7, "adam": 7, "sgd": 3, "sgd_momentum": 5, "adagrad": 5, "rmsprop": 9}
"""Reads and writes of each parameter value in one step by torch's fused kernels (RMSprop has
none): Adam reads parameter, gradient and two states and writes all but the gradient."""


def check_optimizer(name: str) -> None:
    if name not in OPTIMIZER_COPIES:
        known = ", ".join(OPTIMIZER_COPIES)
        raise PlanError(f"optimizer {name!r} has no known state; known are {known}")


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one rank that live as long as the job."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int


def training_state(
    stored_bytes: int, trained_bytes: int, *, optimizer: str, exchange: Exchange, dp_shard: int
) -> State:
    """Returns the bytes of a rank that would hold `stored_bytes` of parameters and buffers if
    nothing were split over `dp_shard` ranks."""
    check_optimizer(optimizer)
    part = ceil(trained_bytes / dp_shard)
    kept = part if exchange.is_split("parameters") else trained_bytes
    return State(
        parameters_bytes=stored_bytes - trained_bytes + kept,
        gradients_bytes=part if exchange.is_split("gradients") else trained_bytes,
        optimizer_bytes=OPTIMIZER_COPIES[optimizer]
        * (part if exchange.is_split("optimizer") else trained_bytes),
    )


def optimizer_traffic(trained_bytes: int, optimizer: str) -> float:
    """Returns the bytes that stepping parameters of `trained_bytes` reads and writes."""
    check_optimizer(optimizer)
    return _PASSES[optimizer] * trained_bytes
