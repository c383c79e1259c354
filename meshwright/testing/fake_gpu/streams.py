"""Which stream does what, and what it has waited for: finds what two do to one memory in no order.

The order is what torch's own sanitizer for CUDA makes of launches, events and waits. Here the host
is a stream, too: what it sends off comes after all that it has done, and what it does comes after
what it has waited for. A collective runs on a stream of its group.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor
from torch.cuda._sanitizer import StreamSynchronizations

from meshwright.ir.torch_private import leaves, makes_view, storage_key, written_arguments

MAIN, HOST = 0, -1
_RECEIVES = {"c10d.recv_": 0, "c10d.alltoall_base_": 0}
"""Operators that write to an argument and do not say so: its place."""
_FACTORIES = ("aten.empty", "aten.new_empty", "aten.set_", "aten.resize_", "aten.detach", "prim.")
"""What makes memory, or looks into it, and touches none."""


class Streams:
    """All that happens, in the order in which the host sends it off."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.late: list[str] = []
        """Memory that nobody gets when it goes back, but when the host next looks at a stream."""
        self._is_over = False
        self._order = StreamSynchronizations()
        self._order.create_stream(HOST)
        self._now, self._numbers, self._events = count(1), count(1), count(1)
        self._here: dict[int, int] = {}
        """Thread -> the stream that it has chosen; others follow the first one."""
        self._first = threading.get_ident()
        self._memories: dict[int, _Memory] = {}

    def stop(self) -> None:
        """What comes is not of interest."""
        self._is_over = True

    @property
    def current(self) -> int:
        """The stream on which this thread's launches go."""
        return self._here.get(threading.get_ident(), self._here.get(self._first, MAIN))

    def make(self) -> int:
        """Returns a new stream."""
        number = next(self._numbers)
        self._order.create_stream(number)
        return number

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Inside, this thread's launches go there."""
        thread = threading.get_ident()
        before = self._here.get(thread)
        self._here[thread] = stream
        try:
            yield
        finally:
            if before is None:
                del self._here[thread]
            else:
                self._here[thread] = before

    def record(self, stream: int) -> int:
        """Returns an event: all that the stream has to do by now."""
        event = next(self._events)
        self._after(stream, HOST)
        self._order.create_event(event)
        self._order.record_state(event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        """A stream, or the host, goes on after an event."""
        self._order.stream_wait_for_event(stream, event)

    def host_waits(self) -> None:
        """The host goes on when the current stream has done all that it has to do."""
        self.wait(HOST, self.record(self.current))

    def _after(self, stream: int, other: int) -> None:
        states = self._order.current_sync_states
        self._order._state_wait_for_other(states[stream], states[other])

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> bool:
        """Notes an operator of torch; returns whether the device has to do something for it."""
        name = str(func).rpartition(".")[0]
        given = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in leaves(made) if isinstance(x, Tensor)]
        on_device = any(x.device.type == "cuda" for x in (*given, *results))
        stream = self.current if on_device else HOST
        for x in (*given, *results):
            self._memory(x, stream)
        if name.startswith(_FACTORIES) or makes_view(func):
            return False
        self._after(stream, HOST)
        number = next(self._now)
        self._order.update_seq_num(stream, number)
        wrote = {storage_key(x) for x in _written(func, name, args, kwargs, results)}
        for key in dict.fromkeys(storage_key(x) for x in (*given, *results)):
            self._touch(key, _Access(stream, number, name), writes=key in wrote)
        return on_device

    def _memory(self, x: Tensor, stream: int) -> "_Memory":
        key = storage_key(x)
        if key not in self._memories:
            made = self._memories[key] = _Memory(stream, x.device.type, tuple(x.shape))
            storage = x.untyped_storage()
            made.alive = weakref.ref(storage, lambda _: self._freed(key, made))
        return self._memories[key]

    def _touch(self, key: int, access: "_Access", *, writes: bool) -> None:
        memory = self._memories[key]
        others = [memory.wrote] if memory.wrote else []
        for other in [*others, *memory.read.values()] if writes else others:
            if not self._is_after(access.stream, other):
                self._note(f"{access} beside {other} of the same {memory}")
        memory.last[access.stream] = access
        if writes:
            memory.wrote, memory.read = access, {}
        else:
            memory.read[access.stream] = access

    def _is_after(self, stream: int, other: "_Access") -> bool:
        return other.stream == stream or self._order.is_ordered_after(
            stream, other.number, other.stream
        )

    def keep(self, tensors: Sequence[Tensor], stream: int, *, asked: bool = False) -> None:
        """Memory that is freed is given to nobody before the stream has done what it has to do; as
        torch does it for collectives, or as `record_stream` asks it to."""
        for x in tensors:
            memory = self._memory(x, self.current)
            memory.kept.add(stream)
            memory.asked_to_stay |= asked

    def _freed(self, key: int, memory: "_Memory") -> None:
        """Torch gives memory to whoever asks for some next on the stream that it was made on. What
        it keeps of pinned memory until copies are over, it keeps by itself."""
        self._memories.pop(key, None)
        if memory.kind == "cpu" or self._is_over:
            return
        if memory.asked_to_stay:
            self.late.append(str(memory))
        self._after(memory.made_on, HOST)
        for stream, access in memory.last.items():
            if stream not in memory.kept and not self._is_after(memory.made_on, access):
                self._note(f"a {memory} goes back while {access} may be at it")

    def _note(self, text: str) -> None:
        if text not in self.races:
            self.races.append(text)


class _Access:
    """What a stream does to a memory."""

    def __init__(self, stream: int, number: int, name: str) -> None:
        self.stream, self.number, self._name = stream, number, name

    def __str__(self) -> str:
        where = {HOST: "the host", MAIN: "the main stream"}.get(self.stream, "a side stream")
        return f"{self._name} on {where}"


class _Memory:
    """What was done last to a memory."""

    def __init__(self, made_on: int, kind: str, shape: tuple[int, ...]) -> None:
        self.made_on, self.kind, self._shape = made_on, kind, shape
        self.wrote: _Access | None = None
        self.read: dict[int, _Access] = {}
        """Since then, the last of each stream."""
        self.last: dict[int, _Access] = {}
        self.kept: set[int] = set()
        self.asked_to_stay = False
        self.alive: Any = None

    def __str__(self) -> str:
        return f"{self.kind} memory {list(self._shape)}"


def _written(
    func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
) -> Iterator[Tensor]:
    """What an operator writes to: results, arguments that it says it changes, places to receive."""
    yield from results
    said = written_arguments(func)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in said:
            yield from (x for x in leaves(value) if isinstance(x, Tensor))
    for argument in said:
        yield from (x for x in leaves(kwargs.get(argument)) if isinstance(x, Tensor))
    if name in _RECEIVES:
        yield from (x for x in leaves(args[_RECEIVES[name]]) if isinstance(x, Tensor))


class FakeEvent:
    """A moment on a stream."""

    streams: Streams

    def __init__(self, *_: object, **__: object) -> None:
        self.number = -1

    def record(self, stream: "FakeStream | None" = None) -> None:
        of = self.streams
        self.number = of.record(of.current if stream is None else stream.number)

    def synchronize(self) -> None:
        self.streams.wait(HOST, self.number)

    def elapsed_time(self, _: object) -> float:
        return 1.0


class FakeStream:
    """A stream of the device."""

    streams: Streams
    event: Callable[[], FakeEvent]

    def __init__(self, *_: object, **__: object) -> None:
        self.number = self.streams.make()

    @classmethod
    def current(cls, *_: object) -> "FakeStream":
        """The one on which this thread's launches go."""
        found = cls.__new__(cls)
        found.number = cls.streams.current
        return found

    def wait_stream(self, other: "FakeStream") -> None:
        self.streams.wait(self.number, self.streams.record(other.number))

    def wait_event(self, event: FakeEvent) -> None:
        self.streams.wait(self.number, event.number)

    def record_event(self) -> FakeEvent:
        event = self.event()
        event.record(self)
        return event


class _FakeWork:
    """A collective under way."""

    def __init__(self, streams: Streams, work: Any, event: int, held: object) -> None:
        self._streams, self._work, self._event, self._held = streams, work, event, held

    def wait(self, *given: Any) -> bool:
        self._streams.wait(self._streams.current, self._event)
        self._held = None
        return bool(self._work.wait(*given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def on_its_own_stream(streams: Streams, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of process groups, whose work runs after what is there and beside what follows."""
    own: dict[int, int] = defaultdict(streams.make)

    def begin(group: Any, *args: Any, **kwargs: Any) -> Any:
        stream = own[id(group)]
        streams.wait(stream, streams.record(streams.current))
        with streams.on(stream):
            work = method(group, *args, **kwargs)
            event = streams.record(stream)
        if work is None:
            return None
        held = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        streams.keep(held, stream)
        return _FakeWork(streams, work, event, held)

    return begin
