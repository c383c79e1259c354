"""Whether a step's messages all arrive where a pair's messages have no tags but their order.

So it is under NCCL: per pair of ranks and direction the n-th send meets the n-th receive, and
neither is over before both are there. Looked at without processes: what a rank does is known from
its row and its messages.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from meshwright.ir.plan.lines import Pair
from meshwright.runtime.messages.messages import Message


class Act(Enum):
    """What a rank does with a message."""

    ASK = "asks for"
    SEND = "sends"
    WAIT = "waits for"


Doing = tuple[Act, Message]


def stops(messages: Iterable[Message]) -> list[int]:
    """Counts, per action index, the messages of one source that must have been asked for by then.

    `messages` are all of that source, in the order in which it sends them.
    """
    messages = tuple(messages)
    found = [0] * (1 + max(message.needed_at for message in messages))
    for number, message in enumerate(messages, start=1):
        found[message.needed_at] = max(found[message.needed_at], number)
    return list(accumulate(found, max))


def doings(
    messages: Sequence[Message], rank: int, actions: int, pairs: Collection[int] = ()
) -> Iterator[Doing]:
    """Lists what `rank` does with its messages in a step of so many actions. `pairs`: those that
    run together with the one after them.

    It is what executor and mailbox do: receives are asked for one action ahead of need, or one
    pair; a pair waits for all that it needs, and sends what it has made when both are over.
    """
    others = [m for m in messages if m.source != m.target]
    leaving, arriving, sources = defaultdict(list), defaultdict(list), defaultdict(list)
    for message in others:
        if message.source == rank:
            leaving[message.made_at].append(message)
        else:
            arriving[message.needed_at].append(message)
            sources[message.source].append(message)
    limits = {source: stops(found) for source, found in sources.items()}
    asked: dict[int, int] = defaultdict(int)
    sent: dict[int, list[Message]] = defaultdict(list)
    units = [
        range(n, n + 1 + (n in pairs)) for n in range(actions) if n - 1 not in pairs
    ]  # fmt: skip
    for unit, following in zip(units, [*units[1:], *units[-1:]], strict=True):
        for source, limit in limits.items():
            stop = limit[min(following[-1], len(limit) - 1)]
            yield from ((Act.ASK, m) for m in sources[source][asked[source] : stop])
            asked[source] = max(stop, asked[source])
        for message in (message for index in unit for message in arriving[index]):
            yield Act.WAIT, message
            got = [m for m in sent[message.source] if m.needed_at <= message.made_at]
            yield from ((Act.WAIT, m) for m in got)
            sent[message.source] = [m for m in sent[message.source] if m not in got]
        for message in (message for index in unit for message in leaving[index]):
            yield Act.SEND, message
            sent[message.target].append(message)
    yield from ((Act.WAIT, m) for found in sent.values() for m in found)


@dataclass(eq=False)
class _Connection:
    """The messages of one pair in one direction, as each end has them."""

    ends: dict[int, list[Message]] = field(default_factory=lambda: defaultdict(list))

    def over(self, source: int, target: int) -> int:
        """How many are over."""
        return min(len(self.ends[source]), len(self.ends[target]))


def standstill(ranks: Mapping[int, Iterable[Doing]], *, opened: bool = True) -> tuple[str, ...]:
    """Says who waits for what for ever, or which ends of a pair disagree; nothing if all is well.

    With `opened` False a connection is made when an end first needs it, and that end then does
    nothing more until the other one needs it too.
    """
    rows = {rank: list(done) for rank, done in ranks.items()}
    at = dict.fromkeys(rows, 0)
    connections: dict[Pair, _Connection] = defaultdict(_Connection)
    places: dict[tuple[int, Message], int] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in rows.items():
            while at[rank] < len(row):
                act, message = row[at[rank]]
                pair = message.source, message.target
                connection = connections[pair]
                mine = connection.ends[rank]
                if act is Act.WAIT:
                    if places.get((rank, message), len(row)) >= connection.over(*pair):
                        break
                elif not mine or mine[-1] != message:
                    places[rank, message] = len(mine)
                    mine.append(message)
                    moved = True
                if act is not Act.WAIT and not opened and not connection.over(*pair):
                    break
                at[rank] += 1
                moved = True
    apart = [_apart(pair, connection) for pair, connection in connections.items()]
    stuck = [
        f"rank {rank} {rows[rank][at[rank]][0].value} {named(rows[rank][at[rank]][1])}"
        for rank in rows
        if at[rank] < len(rows[rank])
    ]
    return (*filter(None, apart), *stuck)


def named(message: Message) -> str:
    """Names a message in words."""
    what = f"the gradient of {message.value}" if message.gradient else message.value
    return (
        f"{what} of micro-batch {message.microbatch} from rank {message.source} to rank "
        f"{message.target}"
    )


def _apart(pair: Pair, connection: _Connection) -> str:
    """The first message in which two ends disagree."""
    source, target = pair
    for sent, asked in zip(connection.ends[source], connection.ends[target], strict=False):
        if sent != asked:
            return f"rank {source} sends {named(sent)} where rank {target} asks for {named(asked)}"
    return ""
