"""Training state per rank: parameters, gradients, optimizer state, and what of it is split."""

from dataclasses import dataclass
from math import ceil

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Kind
from meshwright.forms.updates import update


@dataclass(frozen=True, slots=True)
class JobBytes:
    """Bytes of one rank that live as long as the job."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0
    """Of all kinds, in the host's memory."""


def training_state(
    stored_bytes: int,
    trained_bytes: int,
    *,
    optimizer: str,
    exchange: Exchange,
    dp_shard: int,
    frozen_bytes: int = 0,
) -> JobBytes:
    """Returns the bytes of a rank that would hold `stored_bytes` of parameters and buffers, as they
    are stepped, if nothing were split over `dp_shard` ranks and copied; `frozen_bytes` of them are
    parameters without gradients, which cost nothing but their place."""

    def kept(kind: Kind) -> int:
        return ceil(trained_bytes / exchange.parts(kind, dp_shard))

    def here(kind: Kind) -> float:
        return exchange.here(kind) if exchange.row_copies else 1.0

    parameters = ceil(exchange.parameter_bytes(trained_bytes, dp_shard) * here("parameters"))
    parameters += stored_bytes - trained_bytes - frozen_bytes
    parameters += ceil(frozen_bytes / exchange.parts("parameters", dp_shard))
    stepped, copies = kept("optimizer"), update(optimizer).copies
    state = ceil(copies * ceil(stepped * here("optimizer")))
    gone, on_host = exchange.hosted, exchange.on_host
    read = exchange.copied if exchange.copies_on_host else 0.0
    beside = {"parameters": 1 + read, "gradients": 1, "optimizer": copies}
    return JobBytes(
        parameters_bytes=0 if "parameters" in gone else parameters,
        gradients_bytes=kept("gradients"),
        optimizer_bytes=0 if "optimizer" in gone else state,
        host_bytes=ceil(sum([n * stepped for kind, n in beside.items() if kind in on_host]))
        + ("parameters" in gone) * (stored_bytes - trained_bytes),
    )


def optimizer_traffic(trained_bytes: int, optimizer: str) -> float:
    """Returns the bytes that stepping parameters of `trained_bytes` reads and writes."""
    return update(optimizer).passes * trained_bytes
