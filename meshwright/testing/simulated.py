"""Several ranks in one process, one thread each: for tests of ops and of generated code.

    def body(comm):                                # runs once per rank
        local = comm.slice(whole, "tp", dim=0, sizes=(3, 2), backward="pad")
        return comm.all_gather(local, "tp", dim=0, sizes=(3, 2), backward="slice")

    results = simulate({"dp": 1, "tp": 2}, body)   # results[rank], row-major over the axes

Autograd works inside `body`: on a CPU, backward runs in the thread that asks for it. Leaves must
not be shared between ranks; make them with `detach().clone().requires_grad_()`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.collectives.line import AtOnce, Line
from meshwright.codegen.lower.local import bind
from meshwright.ir.graph.images import channels_last
from meshwright.ir.graph.op_site import Form, In, RankDevice

T = TypeVar("T")


class _Room:
    """Where the threads of one line meet."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=60)
        self.slots: list[list[Tensor]] = [[] for _ in range(size)]


class ThreadLine(AtOnce):
    """A line whose ranks are threads."""

    def __init__(self, room: _Room, rank: int) -> None:
        self.room = room
        self.size = len(room.slots)
        self.rank = rank

    def _exchange(self, mine: list[Tensor]) -> list[list[Tensor]]:
        self.room.slots[self.rank] = mine
        self.room.barrier.wait()
        everyone = list(self.room.slots)
        self.room.barrier.wait()
        return everyone

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        stacked = torch.stack([parts[0] for parts in self._exchange([x.detach().clone()])])
        return stacked.amax(0) if largest else stacked.sum(0, dtype=x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([parts[0] for parts in self._exchange([x.detach().clone()])])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)[self.rank]

    def all_to_all(self, parts: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        everyone = self._exchange([part.detach().clone() for part in parts])
        received = [theirs[self.rank] for theirs in everyone]
        assert [tuple(x.shape) for x in received] == [tuple(shape) for shape in shapes]
        return received

    def shift(self, x: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        received = self._exchange([x.detach().clone()])[self.rank - 1][0]
        assert tuple(received.shape) == tuple(shape)
        return lambda: received


def coordinates_of(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """Coordinates of `rank`, row-major: the last axis varies fastest."""
    found = {}
    for axis, size in reversed(sizes.items()):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in sizes}


def simulate(sizes: dict[str, int], body: Callable[[Comm], T], seed: int = 0) -> list[T]:
    """`body(comm)` on every rank of a mesh of `sizes`, all at once; raises the first error."""
    world = prod(sizes.values())
    rooms: dict[tuple[object, ...], _Room] = {}
    comms = []
    for rank in range(world):
        where = coordinates_of(sizes, rank)
        lines: dict[str, Line | None] = {}
        for axis, size in sizes.items():
            others = tuple((name, at) for name, at in where.items() if name != axis)
            room = rooms.setdefault((axis, others), _Room(size))
            lines[axis] = ThreadLine(room, where[axis]) if size > 1 else None
        comms.append(Comm(lines, sizes, where, seed))

    def let_the_others_go(ended: Future[T]) -> None:
        if ended.exception():
            for room in rooms.values():
                room.barrier.abort()

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(body, comm) for comm in comms]
        for future in futures:
            future.add_done_callback(let_the_others_go)
    errors = [error for future in futures if (error := future.exception())]
    first = [error for error in errors if not isinstance(error, BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return [future.result() for future in futures]


def evaluate(form: Form, comm: Comm, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs the form on local inputs."""

    given = list(inputs)
    for i in form.channels_last:
        given[i] = channels_last(given[i])

    def resolve(arg: In | RankDevice) -> object:
        return given[arg.index] if isinstance(arg, In) else comm.device

    target, args, kwargs = bind(form, resolve)
    if form.target.startswith("sharded."):
        args = (comm, *args)
    result = target(*args, **kwargs)
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    if form.divisor != 1:
        outputs = tuple(output / form.divisor for output in outputs)
    return outputs
