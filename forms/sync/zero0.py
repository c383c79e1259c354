"""Gradients are summed in place, over all replicas, as blocks finish in the last backward."""

from meshwright.forms.sync.exchange import Event, Exchange, Hold, Send, Work
from meshwright.ir.conversions import Primitive


def describe(replicas: int) -> Exchange:
    """Buckets are flat tensors that hold the gradients all the time, cleared after each step; one
    replica alone has gradients where its backward makes them."""
    state = (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
    )
    if replicas == 1:
        return Exchange((
            *state,
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
        ))  # fmt: skip
    return Exchange((
        *state,
        Hold(kind="gradients", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp", unit="bucket",
             at=Event.AFTER_LAST, until=Event.END),
        Work(what="gradients", unit="bucket", at=Event.UPDATED, moved=1.0),
    ))  # fmt: skip
