"""The optimizer's state in the host's memory, and its step there: what runs around a form of
synchronisation (Ren et al. 2021, ZeRO-Offload)."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.forms.around import AroundRun
from meshwright.forms.host_link import HostLink
from meshwright.forms.running import Held, LaterStep, Samples, Slot, SyncRun
from meshwright.ir.comm.p2p_collectives import Waitable


class HostPiece:
    """A parameter, or a rank's rows of it, on the device and on the host. Where blocks read a copy
    of it, the device has only that, and the host makes the copy."""

    def __init__(
        self, here: Held, calls: Sequence[int], link: HostLink, copy: Slot | None = None
    ) -> None:
        self.here, self.calls, self._link = here, frozenset(calls), link
        values = link.room(here.tensor)
        link.leave(here.tensor.detach(), values).wait()
        tensor = nn.Parameter(values, requires_grad=here.tensor.requires_grad)
        self.host = replace(here, tensor=tensor)
        self.read: Tensor = copy.whole if copy else here.tensor
        """What blocks read, on the device."""
        self.copy: Tensor | None = None
        """On the host, as it is read."""
        if copy:
            self.copy = link.room(copy.whole)
            self.cast()
        self.gone = False
        """Whether the gradient of this step has left the device, or is on its way."""
        self._room: Tensor | None = None
        """For the gradient, on the host."""
        self._flying: Waitable | None = None

    @property
    def is_trained(self) -> bool:
        return self.here.param.requires_grad

    def leave(self, landings: "Landings") -> Waitable | None:
        """Starts to move the gradient, which is added to those that have gone in this step; None if
        there is none."""
        of = self.here.tensor if self.read.grad is None else self.read
        gradient, of.grad = of.grad, None
        self.gone = True
        if gradient is None:
            return None
        if self._room is None:
            self._room = self._link.room(self.host.tensor)
        if self._flying is not None:
            self._flying.wait()
        first = self.host.tensor.grad is None
        self.host.tensor.grad = self._room
        if first and gradient.dtype is self._room.dtype:
            self._flying = self._link.leave(gradient, self._room)
        else:
            self._flying = landings.leave(gradient, self._room, adds=not first)
        return self._flying

    def cast(self) -> None:
        """The host has new values: it makes the copy that blocks read, if they read one."""
        if self.copy is not None:
            with torch.no_grad():
                self.copy.copy_(self.host.tensor)

    def arrive(self) -> Waitable:
        """Starts to bring what blocks read to the device."""
        values = self.host.tensor.detach() if self.copy is None else self.copy
        # `.data` has its own version counter: refilling does not look like a change to autograd.
        return self._link.arrive(values, self.read.data)

    @property
    def on_host(self) -> list[Tensor]:
        found = (self.host.tensor.detach(), self.copy, self._room)
        return [tensor for tensor in found if tensor is not None]


class Landings:
    """Room on the host where gradients arrive that are cast or added to others there."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.rooms: list[Tensor] = []
        """All that there are."""

    def leave(self, gradient: Tensor, total: Tensor, *, adds: bool) -> Waitable:
        """Starts to move a gradient; when it has been waited for, `total` has it too, or is it."""
        free = self._free.setdefault((gradient.shape, gradient.dtype), [])
        if free:
            room = free.pop()
        else:
            room = self._link.room(gradient)
            self.rooms.append(room)
        return _Landing(self._link.leave(gradient, room), room, total, free, adds=adds)


class _Landing:
    """A gradient on its way to a sum."""

    def __init__(
        self, work: Waitable, room: Tensor, total: Tensor, free: list[Tensor], *, adds: bool
    ) -> None:
        self._work, self._total, self._free, self._adds = work, total, free, adds
        self._room: Tensor | None = room

    @torch.no_grad()
    def wait(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            self._work.wait()
            self._total.add_(room) if self._adds else self._total.copy_(room)
            self._free.append(room)


class SteppedOnHost(AroundRun):
    """Gradients go to the host as they are whole, the optimizer steps what lies there, and values
    come back before a block reads them."""

    in_flight = 2
    """Blocks whose gradients are on their way to the host at once, at most: they are held
    meanwhile."""

    def __init__(
        self,
        inner: SyncRun,
        slots: Sequence[Slot],
        link: HostLink,
        copies: Mapping[int, Slot],
        *,
        each: bool = False,
    ) -> None:
        """`inner`: what synchronises; it steps nothing later than the optimizer's own step.
        `copies`: what blocks read of a held tensor, by its id, where they read a copy. `each`:
        there are no replicas, and gradients go in every micro-batch."""
        super().__init__(inner)
        self.link, self._landings = link, Landings(link)
        by_param = {id(slot.param): slot for slot in slots}
        self.pieces = [
            HostPiece(
                held, by_param[id(held.param)].calls, link, copies.get(id(held.tensor))
            )
            for held in inner.held if self.moves(held)
        ]  # fmt: skip
        for piece in self.pieces:  # when all have left: several may be views of one tensor
            if piece.copy is not None:
                piece.here.tensor.untyped_storage().resize_(0)  # gradients alone are there
        self._stepped_here = [
            piece.here.tensor.detach() for piece in self.pieces
            if by_param[id(piece.here.param)].is_copy
        ]  # fmt: skip
        """Parts of what is stepped, of which ranks make the copies that all gather."""
        self._each: dict[int, list[HostPiece]] = {}
        """What goes in every micro-batch, by the call that is the last to add to its gradient."""
        for piece in self.pieces if each else ():
            if piece.is_trained:
                self._each.setdefault(min(piece.calls), []).append(piece)
        moved = {id(piece.here): piece.host for piece in self.pieces}
        self.held = tuple(moved.get(id(held), held) for held in inner.held)
        self._by_tensor = {id(piece.here.tensor): piece for piece in self.pieces}
        self._kept_here: Set[str] = frozenset()
        self._leaving: list[list[Waitable]] = []
        self._arriving: dict[HostPiece, Waitable] = {}
        self._all_gone = False
        self._made()

    def _made(self) -> None:
        """All pieces are on the host."""

    def moves(self, held: Held) -> bool:
        """Whether a parameter is on the host too."""
        return held.param.requires_grad

    def stay_until_summed(self, names: Set[str]) -> None:
        self._kept_here = names

    @property
    def reduced(self) -> tuple[Held, ...]:
        return self.held if self._all_gone else self.inner.reduced

    @property
    def is_settled(self) -> bool:
        return not self._arriving and self.inner.is_settled

    @property
    def on_host(self) -> list[Tensor]:
        if not self.link.apart:
            return []
        return [*self._landings.rooms, *(x for piece in self.pieces for x in piece.on_host)]

    @property
    def kept(self) -> list[Tensor]:
        found = [*self.inner.kept, *self._stepped_here]
        if self.link.apart:
            return found
        copies = [piece.copy for piece in self.pieces if piece.copy is not None]
        return [*found, *copies, *self._landings.rooms]

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._all_gone = False
        for piece in self.pieces:
            piece.host.tensor.grad, piece.gone = None, False
        self.inner.begin(batch, next_batch)

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        self._await_values(call)
        self.inner.before_forward(call, ahead)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        self._await_values(call)
        self.inner.before_backward(call, ahead)

    def _await_values(self, call: int) -> None:
        for piece in [p for p in self._arriving if call in p.calls]:
            self._arriving.pop(piece).wait()

    def after_backward(self, call: int, last: bool) -> None:
        # As they were made: what runs inside would add them to others.
        self._leave([piece for piece in self._each.get(call, ()) if self._may_go(piece)])
        self.inner.after_backward(call, last)
        if self._each:
            return
        ready = [self._by_tensor[id(x)] for x in self.inner.arrived() if id(x) in self._by_tensor]
        self._leave([piece for piece in ready if self._may_go(piece)])

    def _may_go(self, piece: HostPiece) -> bool:
        """Whether nothing is added to a gradient that replicas agree on."""
        param = piece.here.param
        return not param.sum_over and param.name not in self._kept_here

    def _leave(self, pieces: Sequence[HostPiece]) -> None:
        works = [w for piece in pieces if (w := piece.leave(self._landings)) is not None]
        if works:
            while len(self._leaving) >= self.in_flight:
                self._await_oldest()
            self._leaving.append(works)

    def _await_oldest(self) -> None:
        for work in self._leaving.pop(0):
            work.wait()

    def leave(self) -> None:
        for piece in self.pieces:
            if piece.is_trained and not piece.gone:
                self._leave([piece])
        while self._leaving:
            self._await_oldest()
        self._all_gone = True

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self.written()

    def written(self) -> None:
        self._bring()
        if any(piece.here.rows is not None for piece in self.pieces):
            self._await_all()
            self.inner.written()

    def _bring(self) -> None:
        """Starts to bring all values, as the next forward reads them."""
        self._await_all()
        for piece in sorted(self.pieces, key=lambda p: min(p.calls)):
            piece.cast()  # while those before it are on their way
            self._arriving[piece] = piece.arrive()

    def _await_all(self) -> None:
        for work in self._arriving.values():
            work.wait()
        self._arriving.clear()

    def settle(self) -> None:
        self._await_all()
        self.inner.settle()


class FromHost(SteppedOnHost):
    """The device has a parameter only while a block runs that reads it, or is about to."""

    in_flight = 1
    """The next block's parameters take about as long to come as this one's gradients to go."""

    def _made(self) -> None:
        self._users = dict.fromkeys(self.pieces, 0)
        self._bytes = {p: p.read.untyped_storage().nbytes() for p in self.pieces}
        self._of_call: dict[int, list[HostPiece]] = {}
        for piece in self.pieces:
            self._free(piece)

    def moves(self, held: Held) -> bool:
        return True

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        self._open(call, ahead)
        self.inner.before_forward(call, ahead)

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        self._open(call, ahead)
        self.inner.before_backward(call, ahead)

    def _open(self, call: int, ahead: Sequence[int]) -> None:
        for piece in self._pieces_of(call):
            self._fetch(piece)
            self._users[piece] += 1
        for piece in self._pieces_of(call):
            if piece in self._arriving:
                self._arriving.pop(piece).wait()
        for later in ahead:
            for piece in self._pieces_of(later):
                self._fetch(piece)

    def _fetch(self, piece: HostPiece) -> None:
        """Starts to bring a parameter, unless it is there or on its way."""
        if not self._users[piece] and piece not in self._arriving:
            piece.read.untyped_storage().resize_(self._bytes[piece])
            self._arriving[piece] = piece.arrive()

    def close(self, call: int) -> None:
        self.inner.close(call)
        for piece in self._pieces_of(call):
            self._users[piece] -= 1
            if not self._users[piece] and piece not in self._arriving:
                self._free(piece)

    def written(self) -> None:
        """The next block that reads them brings them."""
        for piece in self.pieces:
            piece.cast()

    def settle(self) -> None:
        """Nothing is on its way but within a step."""
        self.inner.settle()

    def _free(self, piece: HostPiece) -> None:
        piece.read.untyped_storage().resize_(0)

    def _pieces_of(self, call: int) -> list[HostPiece]:
        if call not in self._of_call:
            self._of_call[call] = [piece for piece in self.pieces if call in piece.calls]
        return self._of_call[call]


class NothingAhead(FromHost):
    """Parameters come when their block is about to run: meanwhile the gradients of the one before
    it, which are as large, go."""

    def before_backward(self, call: int, ahead: Sequence[int]) -> None:
        super().before_backward(call, ahead)
        while self._leaving:
            self._await_oldest()
