"""Replicas train alone, and averages of their parameters arrive steps later (Zhou et al. 2020).

Along dp_replicate nothing is sent of gradients. After every `every`-th step a replica starts to
average its parameters with the others', and `delay` steps later it takes the average in by a rule:
`corrected` keeps what it has learnt since whole (x - snapshot + average), `mix` is the published
one (keep x + (1 - keep) average), `overwrite` takes the average. With `fragments`, parts of the
parameters take turns; with `outer_lr` and `outer_momentum`, steps of Nesterov's momentum are taken
along what replicas have changed in a round (DiLoCo, Douillard et al. 2023).

Inside a replica, along dp_shard, ZeRO goes on as `zero` says. A replica's gradient is that of the
mean over its own samples. States of the optimizer stay its own, and so do the statistics of
batch-norms, which are those of its own samples: whoever reads parameters sees the mean of both.
What all have to know together, such as a loss that is no number, they hear `delay` steps later
(`meshwright.forms.alone`), so that one that is late holds up nobody until then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms import sync
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Send
from meshwright.forms.flat import BUCKET_BYTES
from meshwright.forms.running import (
    Held,
    LaterStep,
    Lines,
    ParameterStore,
    Peers,
    Samples,
    Slot,
    SyncRun,
    SyncState,
)
from meshwright.forms.settings import FormSettings, Known, Number, Word, wrong_settings
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage, sync_name

EXACT = False
CHANGES = "delayed"
"""What a search must be allowed to take it by itself."""
CLIPS = False
"""Replicas' gradients differ, and so would their norms."""
_SETTINGS: Known = {
    "every": Number(4, 1, 2**20), "delay": Number(2, 0, 2**20), "fragments": Number(1, 1, 2**20),
    "rule": Word(("corrected", "mix", "overwrite")), "keep": Number(0.5, 0.0, 1.0),
    "outer_lr": Number(1.0, 0.0, 1e6), "outer_momentum": Number(0.0, 0.0, 1.0),
}  # fmt: skip


GIVES_UP = (
    "replicas train alone between averages of their parameters, which arrive steps later: losses "
    "are near those of plain training, and not equal to them; the optimizer's state, and "
    "statistics of batch-norms, are a replica's own"
)


def ladder() -> tuple[Mapping[str, Setting], ...]:
    """Returns settings that are worth trying, those that change least first."""
    return tuple({"every": 2 * delay, "delay": delay} for delay in (1, 2, 4, 8, 16))


def store(zero: int) -> str:
    """Returns the store that it takes where a plan names none: that of ZeRO inside a replica."""
    return sync.usual_store(sync_name(zero, 2), zero)


def splits(zero: int) -> bool:
    """Tells whether it takes stores of which a rank has its part."""
    return sync.takes_parts(sync_name(zero, 2), zero)


def describe(
    replicas: int, zero: int = 0, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what ZeRO does inside a replica, and the averages."""
    rounds = _Rounds.of(settings)
    inner = sync.described(sync_name(zero, 2) if zero else sync_name(0, 1), 2 if zero else 1)
    rows = [row for row in inner.rows if not (isinstance(row, Send) and row.axis == "dp_replicate")]
    part = inner.is_split("optimizer")
    copies = (rounds.rule == "corrected") + 2 * (rounds.outer is not None)
    kept = Hold(
        kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=copies * (not part),
        part=copies * part,
    )  # fmt: skip
    average = Send(
        what="parameters", primitive=Primitive.ALL_REDUCE, axis="dp_replicate", unit="bucket",
        at=Event.UPDATED, until=Event.UPDATED, lag=rounds.delay, every=rounds.every, of_part=part,
    )  # fmt: skip
    found = [*rows, average]
    if copies:
        found.append(kept)
    if not rounds.delay:
        found.append(Hold(kind="communication", unit="bucket", since=Event.UPDATED,
                          until=Event.UPDATED, whole=1 - part, part=int(part)))  # fmt: skip
    return replace(inner, rows=tuple(found), agrees=False, apart=True)


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    said = stage.sync.settings if stage.sync else {}
    wrong = list(wrong_settings("dasgd", _SETTINGS, said))
    yield from wrong
    if wrong:
        return
    told, replicate = FormSettings(_SETTINGS, said), stage.mesh.get("dp_replicate", 1)
    every, delay = told.whole("every"), told.whole("delay")
    if delay >= every:
        message = f"delay {delay} is no shorter than the round of {every} steps"
        yield message, f"delay {every - 1}"
    if told.whole("fragments") > every:
        message = f"fragments {told.whole('fragments')} are more than the steps of a round"
        yield message, f"fragments {every}"
    if stage.dp > 1 and replicate == 1:
        message = "dasgd averages along dp_replicate, which is 1"
        yield message, f"dp_replicate {stage.dp}, or no sync"
    if not stage.zero and stage.mesh.get("dp_shard", 1) > 1:
        message = "with zero 0 gradients are summed over dp_shard too, which dasgd takes as one"
        yield f"{message} replica", "zero 1"


def copies(zero: int) -> bool:
    """Tells whether copies of parameters are sent and kept inside of a replica."""
    return bool(zero)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    inside = sync_name(stage.zero, lines.shards.size)
    alone = replace(lines, replicas=lines.shards, copies=Peers("dp_replicate", None, 1, 0))
    inner = sync.running(inside).build(slots, alone, stage, store)
    rounds = _Rounds.of(stage.sync.settings if stage.sync else {})
    own, whole = lines.own_samples(stage.batch_shares)
    return _Alone(inner, lines, rounds, own / whole)


@dataclass(frozen=True, slots=True)
class _Rounds:
    every: int
    delay: int
    rule: str
    keep: float
    fragments: int
    outer: tuple[float, float] | None
    """Rate and momentum of the outer steps; None where they are plain averages."""

    @classmethod
    def of(cls, said: Mapping[str, Setting]) -> "_Rounds":
        told = FormSettings(_SETTINGS, said)
        outer = told.number("outer_lr"), told.number("outer_momentum")
        return cls(
            told.whole("every"), told.whole("delay"), told.word("rule"), told.number("keep"),
            told.whole("fragments"), None if outer == (1.0, 0.0) else outer,
        )  # fmt: skip

    def begins(self, step: int, fragment: int) -> bool:
        """Whether an average of a fragment begins after a step, the first of which is 1."""
        return (step - fragment * self.every // self.fragments) % self.every == 0 and step > 0


@dataclass(eq=False)
class _Fragment:
    """Parameters that are averaged together."""

    tensors: list[Tensor]
    anchor: list[Tensor] | None = None
    """What the last round ended with, where outer steps are taken."""
    momentum: list[Tensor] | None = None
    started: int = 0
    snapshot: list[Tensor] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
    """Summed over replicas once the works are over; empty: nothing is under way."""
    works: list[Waitable] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def drop(self) -> None:
        """Nothing is under way, and a new round begins with what is there."""
        self.wait()
        self.snapshot, self.average, self.momentum = [], [], None
        self.anchor = None


class _Alone(SyncRun):
    own_states = True

    def __init__(self, inner: SyncRun, lines: Lines, rounds: _Rounds, share: float) -> None:
        self._inner, self._lines, self._rounds, self._share = inner, lines, rounds, share
        self.held = inner.held
        tensors = [h.tensor for h in self.held if h.param.requires_grad and h.tensor.numel()]
        self._fragments = [
            _Fragment(found) for found in _split(tensors, rounds.fragments)
        ]  # fmt: skip
        self._buffers: list[Tensor] = []
        """Which replicas have of their own."""
        self._steps = 0
        self._differ = False
        """Replicas may have different parameters."""
        self._own: list[Tensor] | None = None
        """This replica's parameters and buffers, while those that are there are the average."""
        self._loaded = False

    @property
    def _tensors(self) -> list[Tensor]:
        return [x for fragment in self._fragments for x in fragment.tensors] + self._buffers

    def take_buffers(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = [x for x in buffers if x.is_floating_point()]

    @property
    def reduced(self) -> tuple[Held, ...]:
        return self._inner.reduced

    @property
    def is_settled(self) -> bool:
        return self._own is not None or not self._differ

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._return()
        for fragment in self._fragments if self._rounds.outer and not self._differ else ():
            fragment.anchor = [x.detach().clone() for x in fragment.tensors]
        self._differ |= bool(self._buffers)  # forward changes them, whether or not a step follows
        self._inner.begin()

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._return()
        self._inner.more()

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        self._inner.before_forward(call, ahead)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        self._inner.before_backward(call, ahead)

    def close(self, call: int) -> None:
        self._inner.close(call)

    def after_backward(self, call: int, last: bool) -> None:
        self._inner.after_backward(call, last)

    def finish(self) -> None:
        self._inner.finish()
        for h in self._inner.reduced:
            if h.tensor.grad is not None:  # of a share of the batch: of its mean from here on
                h.tensor.grad.div_(self._share)

    def skipped(self) -> None:
        """Replicas leave out steps of their own, and rounds go on: they count all steps."""
        self._inner.skipped()
        self._round()
        self._inner.written()

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._round()
        self._inner.updated(later)

    def _round(self) -> None:
        """A step is over: averages that are due are taken in, and others begin."""
        self._steps += 1
        self._differ = True
        for number, fragment in enumerate(self._fragments):
            if fragment.average and self._steps == fragment.started + self._rounds.delay:
                self._merge(fragment)
            if self._rounds.begins(self._steps, number):
                self._start(fragment)
                if not self._rounds.delay:
                    self._merge(fragment)

    @torch.no_grad()
    def _start(self, fragment: _Fragment) -> None:
        fragment.started = self._steps
        if self._rounds.rule == "corrected":
            fragment.snapshot = [x.detach().clone() for x in fragment.tensors]
        fragment.average, fragment.works = self._averaged(fragment.tensors)

    @torch.no_grad()
    def _averaged(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Waitable]]:
        """Starts to average over replicas."""
        found: list[Tensor] = []
        works: list[Waitable] = []
        peers, recorder = self._lines.copies, self._lines.recorder
        for group in _buckets(tensors):
            flat = torch.cat([x.detach().reshape(-1) for x in group]).mul_(self._share)
            what = What(
                "parameters", self._lines.stage, peers.axis, "all_reduce", flat.nbytes, peers.size
            )
            start = recorder.mark()
            work = dist.all_reduce(flat, group=peers.group, async_op=True)
            assert work is not None
            works.append(recorder.pending(what, work, start))
            parts = torch.split(flat, [x.numel() for x in group])
            found += [part.view(x.shape) for part, x in zip(parts, group, strict=True)]
        return found, works

    @torch.no_grad()
    def _merge(self, fragment: _Fragment) -> None:
        """What has been averaged is taken in."""
        fragment.wait()
        arrived = fragment.average
        if self._rounds.outer is not None:
            arrived = _outer_step(fragment, arrived, *self._rounds.outer)
        for number, (x, average) in enumerate(zip(fragment.tensors, arrived, strict=True)):
            own = x.detach()
            if self._rounds.rule == "corrected":
                # In the snapshot's memory, which nobody reads again.
                own.add_(fragment.snapshot[number].neg_().add_(average))
            elif self._rounds.rule == "mix":
                own.lerp_(average, 1 - self._rounds.keep)
            else:
                own.copy_(average)
        fragment.snapshot, fragment.average = [], []

    def written(self) -> None:
        if not self._loaded:
            self._own, self._differ = None, False
            for fragment in self._fragments:
                fragment.drop()
        self._loaded = False
        self._inner.written()

    @torch.no_grad()
    def settle(self) -> None:
        self._inner.settle()
        if self.is_settled:
            return
        own = [x.detach().clone() for x in self._tensors]
        average, works = self._averaged(self._tensors)
        for work in works:
            work.wait()
        for x, mean in zip(self._tensors, average, strict=True):
            x.detach().copy_(mean)
        self._own = own
        self._inner.written()

    @torch.no_grad()
    def _return(self) -> None:
        """The replica goes on from its own parameters."""
        self._loaded = False
        if self._own is not None:
            for x, own in zip(self._tensors, self._own, strict=True):
                x.detach().copy_(own)
            self._own = None
            self._inner.written()

    @property
    def kept(self) -> list[Tensor]:
        found = list(self._own or ())
        for one in self._fragments:
            found += [*one.snapshot, *one.average, *(one.anchor or ()), *(one.momentum or ())]
        return found

    def state(self) -> SyncState:
        if not self._steps:
            return {}
        found: dict[str, object] = {"steps": self._steps, "differ": self._differ}
        lists: dict[str, list[Tensor] | None] = {"own": self._own}
        for number, fragment in enumerate(self._fragments):
            fragment.wait()
            found[f"started {number}"] = fragment.started
            for name in ("snapshot", "average", "anchor", "momentum"):
                lists[f"{name} {number}"] = getattr(fragment, name)
        for name, tensors in lists.items():
            found |= {f"{name} {i}": x.clone() for i, x in enumerate(tensors or ())}
        return found

    def load(self, state: SyncState) -> None:
        for fragment in self._fragments:
            fragment.drop()
        self._steps, self._differ = int(state.get("steps", 0)), bool(state.get("differ", False))
        self._own = _listed("own", self._tensors, state) or None
        for number, fragment in enumerate(self._fragments):
            fragment.started = int(state.get(f"started {number}", 0))
            for name in ("snapshot", "average", "anchor", "momentum"):
                found = _listed(f"{name} {number}", fragment.tensors, state)
                setattr(fragment, name, found or ([] if name in ("snapshot", "average") else None))
        self._loaded = bool(state)


def _listed(name: str, tensors: Sequence[Tensor], state: SyncState) -> list[Tensor]:
    keys = [f"{name} {i}" for i in range(len(tensors))]
    return [state[key].clone() for key in keys if key in state]


@torch.no_grad()
def _outer_step(
    fragment: _Fragment, average: Sequence[Tensor], lr: float, momentum: float
) -> list[Tensor]:
    """Where the round leads: from its beginning along what replicas changed, on average; that is
    made in the memory of the averages, which nobody reads again."""
    assert fragment.anchor is not None
    if fragment.momentum is None:
        fragment.momentum = [torch.zeros_like(x) for x in fragment.anchor]
    for begun, speed, x in zip(fragment.anchor, fragment.momentum, average, strict=True):
        moved = x.neg_().add_(begun)
        speed.mul_(momentum).add_(moved)
        begun.sub_(moved.add_(speed, alpha=momentum), alpha=lr)
    return fragment.anchor


def _split(tensors: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Consecutive ones in parts of about equal bytes; some may be empty."""
    found: list[list[Tensor]] = [[] for _ in range(parts)]
    whole, before = sum([x.nbytes for x in tensors]), 0
    for x in tensors:
        found[min(parts - 1, before * parts // max(whole, 1))].append(x)
        before += x.nbytes
    return found


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive ones of one dtype, up to a size."""
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        found: list[Tensor] = []
        for x in tensors:
            if x.dtype == dtype:
                found.append(x)
                if sum([y.nbytes for y in found]) >= BUCKET_BYTES:
                    yield found
                    found = []
        if found:
            yield found
