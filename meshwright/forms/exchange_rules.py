"""Rules that the table of each form of synchronisation keeps, whatever it does."""

from collections.abc import Iterator
from math import inf

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, HostCopy, Hosted, Rewrite, Row, Send
from meshwright.ir.errors import PlanError

_ALWAYS = (Event.BEGIN, Event.NEXT_BEGIN, "stage")
_LIVES = {
    "gradients": (Event.LAST_FORWARD, Event.AFTER_BACKWARD, Event.AFTER_LAST, Event.END),
    "parameters": (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD, Event.UPDATED),
}
"""When each may go."""


def checked(exchange: Exchange) -> Exchange:
    """Returns the table of a form with that of its store, as it is given. PlanError where a row
    breaks a rule that all forms keep, or none of the models can price it."""
    for wrong in _wrong(exchange):
        raise PlanError(wrong)
    return exchange


def _wrong(exchange: Exchange) -> Iterator[str]:
    """What breaks a rule, in words: the row, the rule, and what would be legal."""
    for row in exchange.rows:
        if isinstance(row, Send | Hold) and row.until < _start(row) and not _lag(row):
            yield f"{row} ends before it begins: until {_start(row).name} or later"
        if isinstance(row, Send) and row.loaded and not exchange.stated.get(row.loaded, 0) >= 1:
            yield f"{row}: the busiest rank has the mean or more: {row.loaded} stated as 1 or more"
        if not isinstance(row, Rewrite) and row.share:
            yield from _wrong_share(row, exchange)
    for hold in exchange.holds:
        if hold.whole < 0 or hold.part < 0 or not hold.whole + hold.part:
            yield f"{hold} holds nothing: `whole` or `part` must be 1 or more"
        if hold.kind == "communication" and hold.since < Event.END:
            yield f"{hold}: what is on its way before the end follows from its Send; leave it out"
        if hold.kind == "kept" and (hold.since, hold.until, hold.unit) != _ALWAYS:
            yield f"{hold}: what a form keeps is there from BEGIN to NEXT_BEGIN, of a stage"
        if hold.kind in ("parameters", "optimizer") and hold.share:
            yield f"{hold}: it is whole or a rank's part, and no share of it; leave `share` out"
    if exchange.stepped and not 0 < exchange.stated.get(exchange.stepped, 0) <= 1:
        yield f"{exchange.stepped} is the share that has gradients: stated above 0, up to 1"
    for row in exchange.rows:
        if isinstance(row, Rewrite):
            yield from _wrong_work(row, exchange)
    for send in exchange.sends:
        yield from _wrong_lag(send) if send.lag else _wrong_send(send)
    if any(not send.share for send in exchange.beside_gradients):
        yield "a backward's gradients go in one message: others at END, or a share beside them"
    if len({(send.primitive, send.axis, send.unpacks) for send in exchange.fetches}) > 1:
        yield "a block's parameters are gathered alike before its forward and its backward"
    if exchange.agrees and not _agrees(exchange):
        yield "replicas must agree on gradients: sums on dp, or on dp_shard and dp_replicate"
    stored = [h for h in exchange.holds if h.kind == "parameters" and h.unit == "stage"]
    if len(stored) != 1:
        yield f"parameters are held {len(stored)} times: their store holds them, and no other row"
    gathered = exchange.fetches_forward and exchange.fetches_backward
    read = any(hold.kind == "kept" and hold.share for hold in exchange.holds)
    if exchange.is_split("parameters") and not (gathered or read):
        yield (
            "parameters of which a rank holds a part are gathered before forward and backward, or "
            "the share that is read is kept"
        )
    if "parameters" in exchange.hosted and exchange.published:
        yield (
            "parameters that only the host has are not gathered when UPDATED: ranks step them "
            "whole (zero 0), or keep them on the device too"
        )
    if exchange.is_split("optimizer") and not (
        exchange.published or exchange.late or exchange.is_split("parameters")
    ):
        yield "parameters that one rank steps reach the others: Send them when UPDATED"


def _wrong_share(row: Send | Hold | Hosted | HostCopy, exchange: Exchange) -> Iterator[str]:
    if not 0 < exchange.stated.get(row.share, 0) < inf:
        known = ", ".join(sorted(exchange.stated)) or "nothing"
        yield f"{row}: `stated` has no {row.share} above 0; it has {known}"


def _wrong_work(row: Rewrite, exchange: Exchange) -> Iterator[str]:
    known = Event.LAST_FORWARD, Event.AFTER_LAST, Event.END, Event.UPDATED
    if row.at not in known or row.unit != "bucket":
        names = ", ".join([event.name for event in known])
        yield f"{row}: work has a price on buckets, at one of {names}"
    if row.at is Event.AFTER_LAST and not exchange.last_backward:
        yield f"{row}: work after the last backward comes before what is sent then; at END"


def _wrong_send(send: Send) -> Iterator[str]:
    if send.joint and (send.is_late or send.at not in (Event.END, Event.UPDATED)):
        yield f"{send}: buckets of several groups go together at END or when UPDATED"
    known = _LIVES[send.what]
    if send.at not in known:
        names = ", ".join([event.name for event in known])
        yield f"{send}: {send.what} go at one of {names}"
    if send.is_late:
        if send.at not in (Event.END, Event.UPDATED):
            yield f"{send}: what the next forward hides goes at END or when UPDATED"
        return
    if send.at is Event.LAST_FORWARD and not send.share:
        yield f"{send}: gradients come after a backward; before it goes a share, beside them"
    if send.what == "gradients" and send.until > Event.END:
        yield f"{send}: the optimizer needs gradients; until END, or NEXT_FORWARD if it steps then"
    if send.what == "parameters" and send.until != send.at:
        yield f"{send}: what is gathered is needed at once; until {send.at.name}"
    before_a_block = send.at in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
    if before_a_block != (send.unit == "block" and send.what == "parameters"):
        yield f"{send}: before a block runs its own parameters go, elsewhere buckets"
    if send.at in (Event.END, Event.UPDATED) and send.unit != "bucket":
        yield f"{send}: after the last backward, buckets go"
    if send.at is Event.AFTER_BACKWARD and not (send.adds and send.packs):
        yield f"{send}: what goes in every micro-batch is packed, and added up where it arrives"


def _wrong_lag(send: Send) -> Iterator[str]:
    if send.lag < 0:
        yield f"{send} arrives before it goes: lag 0 or more"
    if send.every < 1:
        yield f"{send} goes in one of {send.every} steps: every 1 or more"
    if send.unit != "bucket" or send.at not in (Event.AFTER_LAST, Event.END, Event.UPDATED):
        yield f"{send}: what is waited for in a later step goes in buckets, once in its own"
    if send.adds or send.ahead:
        yield f"{send}: what is waited for in a later step is neither added up nor fetched ahead"


def _lag(row: Row) -> int:
    return row.lag if isinstance(row, Send) else 0


def _start(row: Send | Hold) -> Event:
    return row.at if isinstance(row, Send) else row.since


def _agrees(exchange: Exchange) -> bool:
    axes = {send.axis for send in exchange.sends if send.what == "gradients"}
    return axes in (set(), {"dp"}, {"dp_shard", "dp_replicate"})
