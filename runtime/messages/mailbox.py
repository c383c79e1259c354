"""Carries a step's messages: receives posted ahead in the sender's order, sends reaped lazily."""

from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.codegen.collectives.line import on_wire, settled
from meshwright.codegen.lower.program import BorderValue, StageProgram
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.border import piece_view
from meshwright.ir.layout.layout import Shard
from meshwright.runtime.messages.messages import Message
from meshwright.runtime.messages.ordering import stops
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.world.groups import Groups

_Key = tuple[int, str, bool, int]
"""Border, value, whether it is the gradient, micro-batch."""


class Mailbox:
    """The messages of one rank. `samples`: the rank's samples of a micro-batch, per stage."""

    def __init__(
        self,
        rank: int,
        messages: tuple[Message, ...],
        programs: tuple[StageProgram, ...],
        samples: dict[int, int],
        groups: Groups,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._rank, self._samples, self._groups, self._device = rank, samples, groups, device
        self._values = {
            (program.index, value.name): _as_sent(value)
            for program in programs
            for value in (*program.receives, *program.sends)
        }
        self._arriving: dict[_Key, list[Message]] = defaultdict(list)
        self._leaving: dict[_Key, list[Message]] = defaultdict(list)
        self._from: dict[int, list[Message]] = defaultdict(list)
        for message in messages:
            key = (message.border, message.value, message.gradient, message.microbatch)
            if message.source == rank:
                self._leaving[key].append(message)
            if message.target == rank:
                self._arriving[key].append(message)
                if message.source != rank:
                    self._from[message.source].append(message)
        self._stops = {source: stops(found) for source, found in self._from.items()}
        self._posted: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._kept: dict[Message, Tensor] = {}
        self._sent: dict[int, list[tuple[Message, Tensor, dist.Work]]] = defaultdict(list)
        self._cursor: dict[int, int] = defaultdict(int)

    def post(self, action: int) -> None:
        """Asks for all that the row's actions up to this index need, in each source's order.

        The order is the sender's, so that the two ends agree even where messages have no tag.
        """
        for source, limits in self._stops.items():
            stop = limits[min(action, len(limits) - 1)]
            for message in self._from[source][self._cursor[source] : stop]:
                buffer = self._buffer(message)
                group = self._groups.between(message.source, message.target)
                work = dist.irecv(on_wire(buffer), source, group=group, tag=message.number)
                assert work is not None
                self._posted[message] = buffer, work
            self._cursor[source] = max(stop, self._cursor[source])

    def send(self, border: int, name: str, gradient: bool, microbatch: int, x: Tensor) -> None:
        """Sends each target its piece of a value, or of a gradient."""
        for message in self._leaving[border, name, gradient, microbatch]:
            value, samples = self._end(message, at_target=False)
            dtype = getattr(torch, value.dtype)
            if not gradient and torch.promote_types(x.dtype, dtype) != dtype:
                raise PlanError(
                    f"{name} goes to another stage in {dtype}, as the plan says, but was made in "
                    f"{x.dtype}, and would be rounded; nearest is a plan with one stage "
                    "(pp=1), or in a precision without autocast (bf16, fp32)"
                )
            laid = x.detach().movedim(1, -1) if value.channels_last else x.detach()
            piece = _piece(laid, value, samples, message.transfer.source_span)
            piece = settled(piece.to(dtype)).contiguous()
            if message.target == self._rank:
                self._kept[message] = piece
                continue
            group = self._groups.between(message.source, message.target)
            start = self._recorder.mark()
            work = dist.isend(on_wire(piece), message.target, group=group, tag=message.number)
            assert work is not None
            self._recorder.sent(message, piece.nbytes, start)
            self._sent[message.target].append((message, piece, work))

    def receive(self, border: int, name: str, gradient: bool, microbatch: int) -> Tensor | None:
        """The whole local value; for a replicated value's gradient the sum of what came, if any."""
        messages = self._arriving[border, name, gradient, microbatch]
        pieces = [self._take(message) for message in messages]
        if not pieces:
            return None
        whole = self._put_together(messages, pieces)
        value, _ = self._end(messages[0], at_target=True)
        return whole.movedim(-1, 1) if value.channels_last else whole

    def _put_together(self, messages: list[Message], pieces: list[Tensor]) -> Tensor:
        value, samples = self._end(messages[0], at_target=True)
        if len(pieces) == 1 and pieces[0].numel() == torch.Size(value.shape).numel():
            return pieces[0].view(value.shape)
        if messages[0].transfer.target_span is None:
            return torch.stack(pieces).sum(0).view(value.shape)
        whole = pieces[0].new_empty(value.shape)
        for message, piece in zip(messages, pieces, strict=True):
            view = _piece(whole, value, samples, message.transfer.target_span)
            view.copy_(piece.view(view.shape))
        return whole

    def finish(self) -> None:
        """Ends the step: every send is over and nothing is left behind."""
        for sends in self._sent.values():
            for _, _, work in sends:
                work.wait()
        assert not self._posted and not self._kept, "messages that nobody took"
        self._sent.clear()
        self._cursor.clear()

    def _take(self, message: Message) -> Tensor:
        if message.source == self._rank:
            return self._kept.pop(message)
        buffer, work = self._posted.pop(message)
        start = self._recorder.mark()
        work.wait()
        self._recorder.waited(message, buffer.nbytes, start)
        self._reap(message)
        return buffer

    def _reap(self, received: Message) -> None:
        """Forgets what the peer must have got before it made this message."""
        waiting = []
        for entry in self._sent[received.source]:
            if entry[0].needed_at <= received.made_at:
                entry[2].wait()
            else:
                waiting.append(entry)
        self._sent[received.source] = waiting

    def _end(self, message: Message, *, at_target: bool) -> tuple[BorderValue, int]:
        """The value as the stage at one end has it, and that stage's samples here."""
        stage = message.border + (at_target is not message.gradient)
        value = self._values[stage, message.value]
        return value, self._samples[stage] // value.parts

    def _buffer(self, message: Message) -> Tensor:
        value, samples = self._end(message, at_target=True)
        numel, span = torch.Size(value.shape).numel(), message.transfer.target_span
        if span is not None:
            numel = numel // samples * (span[1] - span[0])
        return torch.empty(numel, dtype=getattr(torch, value.dtype), device=self._device)


def _as_sent(value: BorderValue) -> BorderValue:
    """With its dims in the order in which it lies in memory: nothing is turned on the way."""
    if not value.channels_last:
        return value
    samples, channels, *space = value.shape
    dp, last = value.dp, len(value.shape) - 1
    if isinstance(dp, Shard) and dp.dim:
        dp = replace(dp, dim=dp.dim - 1 if dp.dim > 1 else last)
    return replace(value, shape=(samples, *space, channels), dp=dp)


def _piece(x: Tensor, value: BorderValue, samples: int, span: tuple[int, int] | None) -> Tensor:
    if span is None or span == (0, samples):
        return x
    assert isinstance(value.dp, Shard)
    view, dim, start, length = piece_view(value.shape, value.dp, samples, span)
    return x.reshape(view).narrow(dim, start, length)
