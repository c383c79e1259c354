"""Each rank of dp_shard holds only its part of all (Rajbhandari et al. 2020, stage 3): a block's
parameters are gathered before it runs, its gradients go after every backward."""

from meshwright.forms.sync.exchange import Event, Exchange, Hold, Send
from meshwright.ir.conversions import Primitive


def describe(replicas: int) -> Exchange:
    """After the last backward, the largest block's flat gradients are there twice at most."""
    gathers = [
        Send(what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="block",
             at=event, until=event, unpacks=True, ahead=True)
        for event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
    ]  # fmt: skip
    return Exchange((
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="gradients", unit="block", since=Event.AFTER_BACKWARD,
             until=Event.AFTER_BACKWARD, whole=1),
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, part=1),
        Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=2),
        *gathers,
        Send(what="gradients", primitive=Primitive.REDUCE_SCATTER, axis="dp_shard", unit="block",
             at=Event.AFTER_BACKWARD, until=Event.END, packs="whole", adds=True),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
             at=Event.END, until=Event.END, of_part=True),
    ))  # fmt: skip
