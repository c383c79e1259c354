"""Forms of synchronisation as a user's own files: `BASE.format(exact=...)` and one of the rest."""

BASE = """
import torch
import torch.distributed as dist
from meshwright.forms.exchange import (Exchange)
from meshwright.forms.exchange_rows import (Event, Hold, Send)
from meshwright.forms.flat import held_whole, trainable
from meshwright.forms.running import SyncRun
from meshwright.ir.layout.conversions import Primitive

EXACT = {exact}
ALWAYS = {{"since": Event.BEGIN, "until": Event.NEXT_BEGIN, "whole": 1}}
STATE = (
    Hold(kind="optimizer", **ALWAYS),
    Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
)
SUM = {{"what": "gradients", "primitive": Primitive.ALL_REDUCE, "axis": "dp", "unit": "bucket",
        "until": Event.END}}

def check(stage):
    if stage.zero:
        yield "only whole parameters", "zero 0"

class Whole(SyncRun):
    def __init__(self, slots, lines):
        self.slots, self.lines = trainable(slots), lines
        self.held = held_whole(slots, lines)
        self.load({{}})

    def begin(self, batch=None, next_batch=None):
        for slot in self.slots:
            slot.whole.grad = None

    def gradient(self, slot):
        return torch.zeros_like(slot.whole) if slot.whole.grad is None else slot.whole.grad

    def sum(self, x):
        dist.all_reduce(x, group=self.lines.replicas.group)
        return x

def build(slots, lines, stage, store):
    return Form(slots, lines)
"""
REST = """
def describe(replicas, sharded=True, settings={}):
    return Exchange((*STATE, Hold(kind="kept", **ALWAYS), Send(at=Event.AFTER_LAST, **SUM)))

class Form(Whole):
    '''Sends what is a multiple of 1/64 of the gradient and the rest of the steps before.'''

    def finish(self):
        self.steps += 1
        for slot, rest in zip(self.slots, self.rests):
            rest += self.gradient(slot).detach()
            sent = (64 * rest).round() / 64
            rest -= sent
            slot.whole.grad = self.sum(sent)

    def state(self):
        if not self.steps:
            return {}
        named = zip(self.slots, self.rests)
        return {"steps": self.steps, **{f"rest of {s.param.fqn}": x for s, x in named}}

    def load(self, state):
        self.steps = state.get("steps", 0)
        self.rests = [
            state.get(f"rest of {s.param.fqn}", torch.zeros_like(s.whole)).clone().detach()
            for s in self.slots
        ]
"""
READS = """
def describe(replicas, sharded=True, settings={}):
    return Exchange((*STATE, Send(at=Event.AFTER_LAST, **SUM)))

class Form(Whole):
    reads_batches = True

    def begin(self, batch=None, next_batch=None):
        super().begin()
        if batch is not None:
            self.more(batch, next_batch, "begin")

    def more(self, batch=None, next_batch=None, what="more"):
        self.seen.append([what, batch[min(batch)].tolist(),
                          next_batch and next_batch[min(batch)].tolist()])

    def finish(self):
        for slot in self.slots:
            slot.whole.grad = self.sum(self.gradient(slot))

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = list(state.get("seen", []))
"""
LATE = """
def describe(replicas, sharded=True, settings={}):
    late = Send(at=Event.END, lag=settings.get("lag", 1), share="rows", **SUM)
    return Exchange((*STATE, late), stated={"rows": settings.get("of_1000", 1000) / 1000})

class Form(Whole):
    '''A step takes the gradients of the one before it.'''

    def finish(self):
        for i, slot in enumerate(self.slots):
            x = self.gradient(slot).detach().clone()
            work = dist.all_reduce(x, group=self.lines.replicas.group, async_op=True)
            slot.whole.grad = self._arrived(i)
            self.under_way[i] = x, work

    def _arrived(self, i):
        x, work = self.under_way.pop(i, (torch.zeros_like(self.slots[i].whole), None))
        if work is not None:
            work.wait()
        return x

    def state(self):
        return {str(i): self._kept(i) for i in list(self.under_way)}

    def _kept(self, i):
        x = self._arrived(i)
        self.under_way[i] = x, None
        return x

    def load(self, state):
        self.under_way = {int(i): (x.clone(), None) for i, x in state.items()}
"""
