"""What ops communicate on their own account: messages that no conversion between ops stands for.

For most ops there is nothing; of the others their families say it (`ir.ops`). A cost model adds,
to what an op computes, what `inner_traffic` says:

    operands = ...                                # per op input and output, whole on `axis`
    for message in inner_traffic(op, strategy, axis_size, inputs, outputs):
        seconds = message.times * time_of(message.kind, message.nbytes)

`SHIFT` is the time of one point-to-point message while every rank of the axis sends and receives
one; the other kinds are primitives of `ir.layout.conversions`, priced on the whole value as there.
Where `beside` is set, the messages travel while the op computes: what takes longer counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.routing import Routing
from meshwright.ir.layout.layout import Strategy

SHIFT = "shift"
"""Each rank sends to a neighbour on the axis and receives from one, all at the same time."""


Leg = Literal["", "out", "home"]


@dataclass(frozen=True, slots=True)
class LocalOperand:
    """An input or output of an op as a rank would hold it if it were whole on the axis in question,
    split as it is on the others, for one micro-batch."""

    shape: tuple[int, ...]
    nbytes: int
    """In the dtype that the op computes in."""


@dataclass(frozen=True, slots=True)
class Inner:
    """Equal messages of one pass over an op."""

    kind: str
    """A communicating primitive, or SHIFT."""
    nbytes: int
    """Of each; of a primitive the whole value, of a shift what the busiest rank sends."""
    times: int
    backward: bool
    """Whether they belong to the backward pass."""
    beside: bool = False
    """Whether the op computes meanwhile."""
    routing: Routing | None = None
    """Of tokens on their way to experts, and of what comes home; the bytes count each once for each
    rank that it goes to."""
    held: int = 0
    """Experts of a rank, then."""
    outer: int = 1
    """In how many parts other axes have cut the experts: tokens that came there are sent on."""
    crowd: float = 1.0
    """What comes to the busiest rank, over the mean rank's: all wait for it."""
    of_replica: bool = False
    """Whether it goes among the ranks of a replica alone, where replicas train alone."""

    leg: Leg = ""
    """Whether rows of tokens go out, or come home; other work can be beside that."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What an op that is split does beside computing and sending, on the busiest rank: messages are
    packed, and what comes of each is put together with the rest."""

    forward_bytes: int
    """Read and written."""
    backward_bytes: int
    forward_calls: int
    """Operators of torch that do it."""
    backward_calls: int


Operands = Sequence[LocalOperand]
FindMessages = Callable[[Op, Strategy, int, Operands, Operands], tuple[Inner, ...]]
FindPasses = Callable[[Op, Strategy, int, Operands, Operands], Passes | None]
FindCopies = Callable[[Op, Strategy, int, Operands, Operands], dict[int, int]]
