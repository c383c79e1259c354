"""NCCL's rules without NCCL: a process group for tests, on Gloo, that hangs where NCCL would.

- A communicator (one per group for collectives and batches of messages, one per group and pair of
  ranks for single messages) is made at its first use, and that blocks until all members use it.
- A communicator is a stream: its next operation starts when the one before is over on this rank.
- Operations have no tags: the n-th of one member meets the n-th of the others. A pair that does not
  match (two sends, other sizes, another collective) is an error here; NCCL would hang, or worse.
- A send is over only when it has been received.

What waits longer than `patience_s` ends in `Hang`, which lists what the rank waits for. A rank's
host stands for its compute stream, so each operation also waits for all that came before it.

Tensors may be on GPUs, also on one that several ranks share, which NCCL refuses: they go through
the host's memory, as Gloo has no collectives but a few for GPUs.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir import torch_private
from meshwright.ir.comm import p2p_collectives
from meshwright.testing.spawn import run_ranks

NAME = "nccl_rule"
PATIENCE_S = 20.0
_HEADER_BYTES = 96
_HEADER, _DATA = 1, 2
"""Gloo tags: what an operation says of itself, and its tensors. Batches have two of their own."""
_NEVER = timedelta(seconds=600)


class Hang(RuntimeError):
    """NCCL would wait for ever."""


def run_under_rule(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    patience_s: float = PATIENCE_S,
    timeout_s: float = 300.0,
) -> list[Any]:
    """What `function(*args)` returns on each rank of a job whose groups keep NCCL's rules."""
    return run_ranks(
        world_size,
        _ruled,
        world_size,
        patience_s,
        function,
        args,
        init=False,
        timeout_s=timeout_s,
    )


def _ruled(
    rank: int, store: str, world_size: int, patience_s: float, function: Any, args: Any
) -> Any:
    global PATIENCE_S
    PATIENCE_S = patience_s
    dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(
        NAME, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    with _as_on_gpus():
        result = function(*args)
    dist.barrier()  # others may still be reading from this rank
    return result


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> "RuledGroup":
    return RuledGroup(store, rank, size)


@contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Gathers and reduce-scatters are torch's, which go straight from rank to rank on CPUs only;
    batches of messages are one operation, which torch does for groups of its own alone."""
    held = p2p_collectives.gather, p2p_collectives.reduce_scatter, dist.batch_isend_irecv

    def gather(result: Tensor, part: Tensor, group: Any) -> Any:
        return torch_private._all_gather(result, part, group=group, async_op=True)

    def reduce_scatter(result: Tensor, whole: Tensor, group: Any) -> Any:
        return torch_private._reduce_scatter(result, whole, group=group, async_op=True)

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        assert isinstance(group, RuledGroup)
        return [group.batch(operations)]

    p2p_collectives.gather, p2p_collectives.reduce_scatter, dist.batch_isend_irecv = (
        gather,
        reduce_scatter,
        batch,
    )
    try:
        yield
    finally:
        p2p_collectives.gather, p2p_collectives.reduce_scatter, dist.batch_isend_irecv = held


class RuledWork(dist._Work):
    """An operation under way."""

    def __init__(self, text: str, stream: str) -> None:
        super().__init__()
        self.text, self.stream = text, stream
        self.over, self.error = threading.Event(), None

    def wait(self, timeout: Any = None) -> bool:
        if not self.over.wait(PATIENCE_S):
            raise Hang(
                f"rank {dist.get_rank()} waits for {self.text} in {self.stream}; {_under_way()}"
            )
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


_streams: list["_Communicator"] = []
_numbers = count()


def _under_way() -> str:
    waiting = [f"{c.name}: {', '.join(w.text for w in c.waiting)}" for c in _streams if c.waiting]
    return "under way: " + ("; ".join(waiting) or "nothing")


class _Communicator:
    """Runs operations one after the other."""

    def __init__(self, group: "RuledGroup", kind: str, members: tuple[int, ...]) -> None:
        self.group, self.kind = group, kind
        self.name = f"{kind} of {group.ranks(members)} in group {group.number}"
        self.waiting: list[RuledWork] = []
        self._join(members)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        _streams.append(self)
        threading.Thread(target=self._serve, daemon=True).start()

    def _join(self, members: tuple[int, ...]) -> None:
        """Blocks the host until all members are here."""
        store = self.group.store
        keys = {m: f"{self.kind}{members}/{m}" for m in members}
        store.set(keys[self.group.rank()], "here")
        end = time.monotonic() + PATIENCE_S
        while not store.check([*keys.values()]):
            if time.monotonic() > end:
                late = [m for m in members if not store.check([keys[m]])]
                raise Hang(
                    f"rank {dist.get_rank()} waits for {self.group.ranks(late)} to make the "
                    f"communicator {self.name}; {_under_way()}"
                )
            time.sleep(1e-3)

    def issue(self, text: str, run: Callable[[], None]) -> RuledWork:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # what is sent has been made
        work = RuledWork(text, self.name)
        self.waiting.append(work)
        self._queue.put((work, run))
        return work

    def _serve(self) -> None:
        while True:
            work, run = self._queue.get()
            try:
                run()
            except RuntimeError as error:
                work.error = error
            self.waiting.remove(work)
            work.over.set()


class RuledGroup(dist.ProcessGroup):
    """See the top of this file."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.store = dist.PrefixStore("rule", store)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, _NEVER)
        self._made: dict[tuple[int, ...], _Communicator] = {}
        self.number = next(_numbers)

    def getBackendName(self) -> str:
        return NAME

    def ranks(self, members: Sequence[int]) -> str:
        """Global ranks, in words."""
        everyone = dist.get_process_group_ranks(self)
        name = "rank" if len(members) == 1 else "ranks"
        return f"{name} {', '.join(str(everyone[m]) for m in members)}"

    def _communicator(self, *members: int) -> _Communicator:
        """Of a pair, or of all."""
        if members not in self._made:
            everyone = members or tuple(range(self.size()))
            self._made[members] = _Communicator(self, "pair" if members else "all", everyone)
        return self._made[members]

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RuledWork:
        return self._message("send", tensors[0], peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RuledWork:
        return self._message("recv", tensors[0], peer, tag)

    def _message(self, kind: str, tensor: Tensor, peer: int, tag: int) -> RuledWork:
        text = f"{kind} {tag} of {tensor.numel()} {tensor.dtype} with {self.ranks([peer])}"
        found = self._communicator(*sorted((self.rank(), peer)))
        return found.issue(text, lambda: self._meet(kind, tensor, peer, tag, 0))

    def _meet(self, kind: str, tensor: Tensor, peer: int, tag: int, more: int) -> None:
        """Says what it is, hears what the peer is, and moves the bytes if they match."""
        mine = f"{kind} {tag} {tensor.numel()} {tensor.dtype}"
        theirs = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        works = [
            self._gloo.send([_as_bytes(mine)], peer, more + _HEADER),
            self._gloo.recv([theirs], peer, more + _HEADER),
        ]
        for work in works:
            work.wait(_NEVER)
        other = {"send": "recv", "recv": "send"}[kind]
        if _as_text(theirs) != f"{other}{mine[4:]}":
            raise Hang(
                f"rank {dist.get_rank()} has '{mine}' where {self.ranks([peer])} has "
                f"'{_as_text(theirs)}'"
            )
        act = self._gloo.send if kind == "send" else self._gloo.recv
        with _on_host([tensor]) as (here,):
            act([here], peer, more + _DATA).wait(_NEVER)

    def batch(self, operations: list[dist.P2POp]) -> RuledWork:
        """One operation of the whole group's communicator, whatever its messages."""

        def run() -> None:
            parts, errors = [], []

            def one(operation: dist.P2POp) -> None:
                kind = "send" if operation.op is dist.isend else "recv"
                # A pair may exchange both ways in one batch: each way has tags of its own.
                sender = self.rank() if kind == "send" else operation.group_peer
                try:
                    self._meet(
                        kind, operation.tensor, operation.group_peer, operation.tag,
                        10 * (1 + sender),
                    )  # fmt: skip
                except RuntimeError as error:
                    errors.append(error)

            for operation in operations:
                parts.append(threading.Thread(target=one, args=(operation,), daemon=True))
                parts[-1].start()
            for part in parts:
                part.join()
            if errors:
                raise errors[0]

        return self._communicator().issue(f"batch of {len(operations)} messages", run)

    def _collective(
        self, text: str, tensors: Sequence[Tensor], run: Callable[..., Any]
    ) -> RuledWork:
        """`run` gets the tensors as they are on the host."""

        def checked() -> None:
            mine = _as_bytes(text)
            all_of_them = [torch.zeros_like(mine) for _ in range(self.size())]
            self._gloo.allgather([all_of_them], [mine]).wait(_NEVER)
            for rank, theirs in enumerate(all_of_them):
                if _as_text(theirs) != text:
                    raise Hang(
                        f"rank {dist.get_rank()} has '{text}' where {self.ranks([rank])} has "
                        f"'{_as_text(theirs)}'"
                    )
            with _on_host(tensors) as here:
                run(*here).wait(_NEVER)

        return self._communicator().issue(text, checked)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> RuledWork:
        return self._collective(
            _text("all_reduce", *tensors), tensors,
            lambda *here: self._gloo.allreduce([*here], options),
        )  # fmt: skip

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> RuledWork:
        return self._collective(
            _text("broadcast", *tensors), tensors,
            lambda *here: self._gloo.broadcast([*here], options),
        )  # fmt: skip

    def reduce(self, tensors: list[Tensor], options: Any = None) -> RuledWork:
        return self._collective(
            _text("reduce", *tensors), tensors, lambda *here: self._gloo.reduce([*here], options)
        )

    def allgather(self, outputs: Any, inputs: list[Tensor], options: Any = None) -> RuledWork:
        (into,), (given,) = outputs, inputs
        return self._collective(
            _text("all_gather", given), [given, *into],
            lambda mine, *here: self._gloo.allgather([[*here]], [mine]),
        )  # fmt: skip

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> RuledWork:
        return self._collective(
            _text("all_gather", given), [output, given],
            lambda into, mine: self._gloo._allgather_base(into, mine),
        )  # fmt: skip

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, options: Any) -> RuledWork:
        return self._collective(
            _text("reduce_scatter", given), [output, given],
            lambda into, mine: self._gloo._reduce_scatter_base(into, mine, options),
        )  # fmt: skip

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None
    ) -> RuledWork:
        (into,), (parts,) = outputs, inputs

        def run(into: Tensor, *parts: Tensor) -> Any:
            # Of unequal sizes, which Gloo does not scatter.
            flat = torch.cat([part.reshape(-1) for part in parts])
            self._gloo.allreduce([flat], options).wait(_NEVER)
            own = flat.split([part.numel() for part in parts])[self.rank()]
            into.copy_(own.view(into.shape))
            return self._gloo.barrier()

        return self._collective(_text("reduce_scatter", *parts), [into, *parts], run)

    def alltoall_base(
        self, output: Tensor, given: Tensor, into: list[int], out: list[int], options: Any = None
    ) -> RuledWork:
        # Sizes differ from rank to rank by right.
        return self._collective(
            "all_to_all", [output, given],
            lambda come, go: self._gloo.alltoall_base(come, go, into, out),
        )  # fmt: skip

    def barrier(self, opts: Any = None) -> RuledWork:
        return self._collective("barrier", [], self._gloo.barrier)

    # torch's newer names for the same.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


@contextmanager
def _on_host(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in the host's memory: copies of those on a GPU, which get the values back."""
    here = [x.cpu() if x.is_cuda else x for x in tensors]
    yield here
    for x, copy in zip(tensors, here, strict=True):
        if x.is_cuda:
            x.copy_(copy)
            torch.cuda.current_stream(x.device).synchronize()


def _text(name: str, *tensors: Tensor) -> str:
    return f"{name} of {', '.join(f'{x.numel()} {x.dtype}' for x in tensors)}"


def _as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode().ljust(_HEADER_BYTES)), dtype=torch.uint8)


def _as_text(header: Tensor) -> str:
    return bytes(header.tolist()).decode().rstrip()
