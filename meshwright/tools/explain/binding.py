"""What binds a plan, in sentences with figures; and what its own figures say would change it."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from meshwright.ir.plan.beside import bounded
from meshwright.ir.plan.detail import StageTraffic
from meshwright.ir.plan.show import SHARES, seconds
from meshwright.ir.text.units import size
from meshwright.tools.explain.facts import Facts

FULL = 0.9
"""Of a device: a plan that uses more of it is bound by memory."""
MUCH = 0.1
"""Of a step: what takes more of it is worth a sentence."""
_LINKED = ("tensor", "gradients", "gather")
_PURPOSE = {"tensors": "tensor", "gradients": "gradients", "parameters": "gather"}


@dataclass(frozen=True, slots=True)
class Sentence:
    """One thing to know."""

    about: str
    """computing, memory, waiting, links, rows, bound, asked."""
    text: str


def binding(facts: Facts) -> tuple[Sentence, ...]:
    """What binds first."""
    found = [*_memory(facts), *_pace(facts), *_waiting(facts), *_links(facts)]
    found += [*_rows(facts), *_hidden(facts), *_bound(facts)]
    weights = _weights(facts)
    return tuple(sorted(found, key=lambda s: -weights.get(s.about, 0.0)))


def _weights(facts: Facts) -> dict[str, float]:
    """Share of the step, or of the device beyond what is comfortable."""
    own, step_s = facts.seconds[facts.busiest], facts.step_s
    linked = sum(own.get(name, 0.0) for name in _LINKED) / step_s
    waiting = own.get("wait", 0.0) / step_s
    room = facts.room(facts.fullest)
    full = facts.memory(facts.fullest).used_bytes / room if room else 0.0
    return {
        "memory": 2.0 if full >= FULL else 0.05,
        "computing": 1.0 - linked - waiting,
        "links": linked,
        "waiting": waiting,
    }


def _pace(facts: Facts) -> Iterator[Sentence]:
    """Of the rank that waits least."""
    own = facts.seconds[facts.busiest]
    parts = sorted(((s / facts.step_s, name) for name, s in own.items()), reverse=True)
    said = ", ".join(f"{SHARES[name]} {share:.0%}" for share, name in parts if share >= 0.005)
    whose = f"pipeline rank {facts.busiest} sets the pace: " if len(facts.seconds) > 1 else ""
    yield Sentence("computing", f"{whose}of {seconds(facts.step_s)}, {said}")


def _memory(facts: Facts) -> Iterator[Sentence]:
    rank = facts.fullest
    memory, room = facts.memory(rank), facts.room(rank)
    names = ("parameters", "gradients", "optimizer", "activations", "communication", "workspace")
    parts = sorted(((getattr(memory, f"{n}_bytes"), n) for n in names), reverse=True)
    said = ", ".join(f"{name} {size(nbytes)}" for nbytes, name in parts[:3] if nbytes)
    whose = f"pipeline rank {rank}" if len(facts.seconds) > 1 else "every rank"
    used = f"{whose} holds {size(memory.used_bytes)}"
    if room:
        share = memory.used_bytes / room
        binds = "memory binds: " if share >= FULL else ""
        spare = f"{size(room - memory.used_bytes)} to spare" if room >= memory.used_bytes else (
            f"{size(memory.used_bytes - room)} too much")  # fmt: skip
        used = f"{binds}{used} of {size(room)} ({share:.0%}; {spare})"
    yield Sentence("memory", f"{used}: {said}{_in_flight(facts, rank)}")


def _in_flight(facts: Facts, rank: int) -> str:
    detail, count = facts.played.detail, facts.in_flight(rank)
    if not detail or count < 2:
        return ""
    saved = max(detail.stage(stage).saved_bytes for stage in facts.stages(rank))
    return f"; {count} micro-batches in flight, {size(saved)} each"


def _waiting(facts: Facts) -> Iterator[Sentence]:
    if len(facts.seconds) < 2:
        return
    busy = [sum(own.values()) - own.get("wait", 0.0) for own in facts.seconds]
    idle = facts.played.timeline.bubble
    text = f"{idle:.1%} of the pipeline's rank-seconds are idle"
    mean_s = sum(busy) / len(busy)
    if max(busy) > (1 + MUCH / 2) * mean_s:
        rank = busy.index(max(busy))
        text += (
            f"; stages are uneven: pipeline rank {rank} is busy for {seconds(max(busy))}, the "
            f"mean for {seconds(mean_s)}"
        )
    else:
        text += "; stages are even, so it is filling and draining: more micro-batches lessen it"
    yield Sentence("waiting", text)


def traffic(facts: Facts) -> list[tuple[int, StageTraffic]]:
    """(stage, what it sends), what takes longest first."""
    detail = facts.played.detail
    if detail is None:
        return []
    stages = range(len(facts.plan.stages))
    rows = [(i, sent) for i in stages for sent in detail.stage(i).traffic]
    return sorted(rows, key=lambda row: -row[1].seconds)


def _links(facts: Facts) -> Iterator[Sentence]:
    rows = traffic(facts)
    if not rows:
        return
    stage, sent = rows[0]
    where = f"stage {stage}, " if len(facts.plan.stages) > 1 else ""
    share = sent.seconds / facts.step_s
    own = facts.seconds[facts.busiest]
    exposed = sum(own.get(name, 0.0) for name in _LINKED) / facts.step_s
    yield Sentence(
        "links",
        f"the busiest link is {sent.link}: {where}{sent.purpose} over {sent.axis}, "
        f"{size(sent.nbytes)} a rank, {seconds(sent.seconds)} ({share:.1%} of the step); what no "
        f"computing hides is {exposed:.1%} of the step on the busiest rank",
    )


def _hidden(facts: Facts) -> Iterator[Sentence]:
    """What the next step's forward hides, of the stage where that is most."""
    told = [
        (predicted.hidden_s, index, str(stage.sync))
        for index, (predicted, stage) in enumerate(
            zip(facts.played.predicted.stages, facts.plan.stages, strict=True)
        )
        if stage.sync is not None and predicted.hidden_s
    ]
    if told:
        hidden_s, index, form = max(told)
        where = f"stage {index}, " if len(facts.plan.stages) > 1 else ""
        yield Sentence(
            "links",
            f"{where}{form}: the next step's forward hides {seconds(hidden_s)} of gathers "
            f"({hidden_s / facts.step_s:.1%} of the step)",
        )


def _rows(facts: Facts) -> Iterator[Sentence]:
    """What whole gradients of tables would be waited for."""
    detail = facts.played.detail
    if detail is None or detail.rows is None:
        return
    saved = detail.rows
    others = len(saved.tables) - 1
    more = f" and {others} more table{'s' * (others > 1)}" if others else ""
    read = f" ({saved.of} reads no others)" if saved.of == "a rank" else ""
    share = 100 * saved.share
    yield Sentence(
        "rows",
        f"if gradients of {saved.tables[0]}{more} went whole, a step would take "
        f"{seconds(saved.whole_step_s)}, and {saved.whole_wait_s / saved.whole_step_s:.0%} of it "
        f"would be waiting for {share:.2g} % of the rows{read}; {' and '.join(saved.forms)} "
        f"sends those alone",
    )


def _bound(facts: Facts) -> Iterator[Sentence]:
    evidence = facts.plan.evidence
    if evidence and evidence.gap is not None:
        yield Sentence(
            "bound",
            f"{bounded(facts.plan)} takes less than {seconds(evidence.bound_s)} by the same "
            f"figures; this one is {evidence.gap:.1%} above",
        )
    if facts.plan.constraints:
        yield Sentence("asked", f"what was asked for binds: {', '.join(facts.plan.constraints)}")


def levers(facts: Facts) -> tuple[str, ...]:
    """What would change the plan, as far as its own figures tell."""
    return (*_more_memory(facts), *_faster_links(facts), *_balanced(facts))


def _more_memory(facts: Facts) -> Iterator[str]:
    """Plans that would be faster and do not fit."""
    room, evidence = facts.room(facts.fullest), facts.plan.evidence
    if room is None or evidence is None:
        return
    for other in evidence.alternatives:
        if other.peak_bytes > room and other.step_s < facts.step_s:
            more = ceil(100 * (other.peak_bytes / room - 1))
            saved = 1 - other.step_s / facts.step_s
            yield (
                f"with {more} % more memory per device, {other.name} would fit: "
                f"{seconds(other.step_s)}, {saved:.1%} less"
            )


def _faster_links(facts: Facts) -> Iterator[str]:
    """At most: half of what a link takes that nothing hides."""
    own = facts.seconds[facts.busiest]
    stages = set(facts.stages(facts.busiest))
    exposed: dict[str, float] = {}
    for stage, sent in traffic(facts):
        name = _PURPOSE.get(sent.purpose)
        if name and stage in stages:
            exposed[sent.link] = exposed.get(sent.link, 0.0) + min(sent.seconds, own.get(name, 0.0))
    for link, spent_s in sorted(exposed.items(), key=lambda item: -item[1]):
        saved = spent_s / 2 / facts.step_s
        if saved >= 0.005:
            yield (
                f"at twice the bandwidth of {link}, this plan would take at most {saved:.1%} less: "
                f"{seconds(spent_s)} of the step stand on it"
            )


def _balanced(facts: Facts) -> Iterator[str]:
    busy = [sum(own.values()) - own.get("wait", 0.0) for own in facts.seconds]
    saved = (max(busy) - sum(busy) / len(busy)) / facts.step_s
    if len(busy) > 1 and saved >= MUCH / 2:
        yield f"with stages of equal work it would take at most {saved:.1%} less"
