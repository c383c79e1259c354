"""Messages among the replicas of a stage, row by row of what its forms of synchronisation do, and
what of them nothing hides."""

from dataclasses import replace
from math import ceil

from meshwright.costmodel.comm.volume import replica_sends
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F
from meshwright.costmodel.stage.late import late_of, unhidden_s
from meshwright.costmodel.stage.program import IDLE, play
from meshwright.costmodel.stage.stage_model import StageModel
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms.exchange_rows import Event, Send
from meshwright.ir.plan.detail import NEXT_FORWARD, SyncMessage

_WHEN = {
    Event.BEFORE_FORWARD: "before blocks run",
    Event.LAST_FORWARD: "under the last forward",
    Event.BEFORE_BACKWARD: "before blocks run",
    Event.AFTER_BACKWARD: "under every backward",
    Event.AFTER_LAST: "under the last backward",
    Event.END: "at the step's end",
    Event.UPDATED: "after the update",
}


def messages_of(tables: CostTables, model: StageModel, times: int) -> tuple[SyncMessage, ...]:
    """Returns what one rank of a stage sends its replicas in a step of so many micro-batches."""
    sync = model.sync
    # Processes that share cores hide nothing from each other.
    hides = slowdown(tables.cluster) <= 1.0
    update_s = model.optimizer.seconds + sync.overheads.step_s
    found: list[tuple[Event, SyncMessage]] = []
    whole_s = None
    for number, send, sent in replica_sends(sync, times):
        if not sent:
            continue
        if whole_s is None:
            whole_s = _step_s(sync, times, update_s)
        without_s = _step_s(replace(sync, free=frozenset([(number, send)])), times, update_s)
        seconds = sum([one.seconds for one in sent])
        message = SyncMessage(
            form=sync.groups[number].exchange.form,
            what=send.what,
            primitive=send.primitive.value,
            axis=send.axis,
            when=_when(send),
            link=sent[0].link,
            nbytes=ceil(sum([one.nbytes for one in sent])),
            seconds=_short(seconds),
            exposed_s=_short(whole_s - without_s if hides else seconds),
        )
        found.append((send.at, message))
    return tuple(message for _, message in sorted(found, key=lambda pair: pair[0]))


def _when(send: Send) -> str:
    if send.lag:
        every = f"every {send.every} steps, " if send.every > 1 else ""
        return f"{every}waited for {send.lag} step{'s' * (send.lag > 1)} later"
    if send.is_late:
        return NEXT_FORWARD
    every = f"every {send.every} steps, " if send.every > 1 else ""
    return every + _WHEN[send.at]


def _step_s(sync: Sync, times: int, update_s: float) -> float:
    """A step of the stage as if it were alone."""
    programs = sync.programs()
    forward_s, backward_s = (play(programs[k].steps, IDLE, sync.overlap)[0] for k in (F, B))
    last = (*programs[B + LAST].steps, *sync.finish(()), *sync.publish())
    last_s = play(last, IDLE, sync.overlap)[0]
    found = times * forward_s + (times - 1) * backward_s + last_s + late_of(sync).exposed_s
    found += update_s
    return found + unhidden_s([sync], times, found)


def _short(value: float) -> float:
    return float(f"{max(value, 0.0):.6g}")
