"""Parameters that one form keeps on a rank: what of them is gathered, and their gradients within a
backward."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from meshwright.costmodel.memory.leaving import LATE, Way
from meshwright.costmodel.stage.buckets import Bucket, Tied
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Send
from meshwright.ir.layout.conversions import Primitive


@dataclass(frozen=True)
class MemoryGroup:
    """Parameters of a stage that one form keeps and synchronises, on a rank."""

    exchange: Exchange
    buckets: tuple[Bucket, ...]
    parameters: tuple[int, ...]
    """Per block: its own, whole, as they are gathered."""
    gradients: tuple[int, ...]
    """Per block: whole, of the parameters that it is the last to add to."""
    largest: tuple[int, ...]
    """Per block: largest gradient of one parameter."""
    frozen: tuple[int, ...] = ()
    """Per block: of `parameters`, those that are not trained; empty: none."""
    still: frozenset[int] = frozenset()
    """Blocks that have no backward."""
    shards: int = 1
    """Ranks that share what is split."""
    tied: tuple[Tied, ...] = ()
    """Parameters that several blocks read."""
    rest: frozenset[int] = frozenset()
    """Blocks whose parameters are gathered at once, and stay so."""
    at_once: bool = False
    """The device is its own host: what leaves for it has arrived at once."""
    casting: tuple[int, ...] = ()
    """Per block: `Owned.casting`; empty: as `largest`."""

    def part(self, nbytes: int) -> int:
        """A rank's of a value of which each has a part, at most."""
        return ceil(nbytes / self.exchange.ways(self.shards))

    @cached_property
    def trained(self) -> int:
        return sum([bucket.nbytes for bucket in self.buckets])

    @cached_property
    def begins(self) -> Sequence[int]:
        """Per block: gradients that are there from its backward on, where there were none."""
        if not self.tied:
            return self.gradients
        found = [*self.gradients]
        for nbytes, readers in self.tied:
            found[readers[0]] -= nbytes
            found[readers[-1]] += nbytes
        return found

    @cached_property
    def again(self) -> Mapping[int, Sequence[int]]:
        """Block -> gradients that it makes of parameters of which a later one has made some."""
        found: dict[int, list[int]] = {}
        for one in self.tied:
            for index in one.readers[:-1]:
                found.setdefault(index, []).append(one.nbytes)
        return found

    @cached_property
    def beside(self) -> Sequence[int]:
        """Per block: the largest gradient of one parameter that it makes, if there are some of
        all."""
        return self._with_tied(self.largest)

    @cached_property
    def cast(self) -> Sequence[int]:
        """Per block: what is there of its gradients beside those that are cast, at most."""
        return self._with_tied(self.casting) if self.casting else self.beside

    def _with_tied(self, sizes: Sequence[int]) -> Sequence[int]:
        found = [*sizes]
        for one in self.tied:
            for index in one.readers:
                found[index] = max(found[index], one.nbytes)
        return found

    @cached_property
    def complete(self) -> dict[int, list[int]]:
        """Block -> bytes of each bucket that is complete after its backward."""
        found: dict[int, list[int]] = {}
        for bucket in self.buckets:
            owner = min(self.rest) if bucket.owner in self.rest else bucket.owner
            found.setdefault(owner, []).append(bucket.nbytes)
        return found

    def arriving(self, step: int, part: Callable[[int], int], in_place: bool) -> Sequence[int]:
        """Per block, on the way forward (`step` 1) or back: its parameters, and the flat tensor out
        of which they come; what is not trained comes after the rest. `part`: a rank's of a bucket,
        which is there too where it is cast."""
        if not self.exchange.fetches:
            return [0] * len(self.parameters)
        own = self.parameters if step > 0 else self._backward
        if in_place:
            return own
        frozen = self._frozen
        if self._casts_parts:
            moving = [2 * (n - still) + part(n - still)
                      for n, still in zip(own, frozen, strict=True)]  # fmt: skip
        else:
            moving = [2 * (n - still) for n, still in zip(own, frozen, strict=True)]
        found = [
            (more if more > n + still else n + still) if n else 0
            for n, still, more in zip(own, frozen, moving, strict=True)
        ]
        if not self.rest:
            return found
        there = sum([own[i] for i in self.rest])
        return [(n + there) * (i not in self.rest) for i, n in enumerate(found)]

    @cached_property
    def late(self) -> Sequence[tuple[int, int]]:
        """Per block: flat buckets on their way when the first forward of a step comes to it, its
        own among them, and while it runs; of later forwards it is too much. None where nothing goes
        under a forward."""
        if not self.exchange.late:
            return ()
        times = max([send.times for send in self.exchange.late])
        flat = [0] * len(self.parameters)
        for bucket in self.buckets:
            flat[bucket.owner] += ceil(bucket.nbytes * times)
        ahead = self.exchange.run_ahead
        return [(sum(flat[i : i + max(1, ahead)]), sum(flat[i + 1 : i + 1 + ahead]))
                for i in range(len(flat))]  # fmt: skip

    @cached_property
    def begins_late(self) -> int:
        """Bytes of buckets that begin to go as soon as the optimizer has stepped, under the next
        forward."""
        if not any([send.at is Event.UPDATED for send in self.exchange.late]):
            return 0
        ahead = self.exchange.run_ahead
        return sum([bucket.nbytes for bucket in self.buckets if bucket.owner < ahead])

    @cached_property
    def flying(self) -> Sequence[int]:
        """Gradients on their way to the host when a micro-batch's backward has ended, the last
        block's last; they may be so until the next one's comes to its second block."""
        exchange = self.exchange
        leaves = exchange.gradients_are_freed and exchange.gradients_leave_each
        # Where parameters come, too, the next forward waits for these meanwhile.
        if not leaves or exchange.packs or exchange.comes_from_host or self.at_once:
            return ()
        lowest = sorted(self.complete)[:2]
        return [ceil(exchange.read * sum(self.complete[index])) for index in reversed(lowest)]

    def gathered(self, step: int, prefetch: int, in_place: bool = False) -> Sequence[int]:
        """Parameters that are gathered while each block runs: its own, and those ahead, the next
        of which is a `step` away. None where nothing is gathered in that direction. A rank's part
        that was cast is there, too, until what is ahead has come, but where it is sent as it lies
        (`in_place`)."""
        exchange = self.exchange
        if not (exchange.fetches_forward if step > 0 else exchange.fetches_backward):
            return ()
        own = self.parameters if step > 0 else self._backward
        rest = sum([own[i] for i in self.rest])
        if rest:
            own = [n * (i not in self.rest) for i, n in enumerate(own)]
        if not prefetch:
            return [n + rest for n in own] if rest else own
        sent = own
        if self._casts_parts and not in_place:
            sent = [n + self.part(n - min(n, still))
                    for n, still in zip(own, self._frozen, strict=True)]  # fmt: skip
        if step > 0:
            return [own[i] + sum(sent[i + 1 : i + prefetch + 1]) + rest for i in range(len(own))]
        return [own[i] + sum(sent[max(0, i - prefetch) : i]) + rest for i in range(len(own))]

    def coming(self, prefetch: int, in_place: bool = False) -> Sequence[int]:
        """Parameters on their way when each block's backward has run and its own are let go. None
        where nothing is gathered ahead."""
        there = self.gathered(-1, prefetch, in_place) if prefetch else ()
        kept = sum([self._backward[i] for i in self.rest])
        return [n - kept - self._backward[i] * (i not in self.rest) for i, n in enumerate(there)]

    @property
    def _casts_parts(self) -> bool:
        """Whether what is gathered is cast before, of what is trained."""
        return bool(self.exchange.copied) and not self.exchange.copies_on_host

    @property
    def _frozen(self) -> Sequence[int]:
        return self.frozen or (0,) * len(self.parameters)

    @cached_property
    def _backward(self) -> Sequence[int]:
        """Of `parameters`, what is gathered for a backward."""
        if not self.still:
            return self.parameters
        return [n * (i not in self.still) for i, n in enumerate(self.parameters)]


class BackwardGradients:
    """Those of a group within a backward: whole until their bucket is packed, and two buckets at
    most on their way."""

    def __init__(
        self,
        group: MemoryGroup,
        part: Callable[[int], int],
        scattering: Callable[[int], int],
        first: bool,
        last: bool,
        holds: bool,
        way: Way | None = None,
    ) -> None:
        """`way`: what is still on its way to the host, if that is asked for; else all that may."""
        exchange = group.exchange
        self._group, self._part, self._scattering = group, part, scattering
        self._begins = first
        self._every = bool(exchange.every_backward)
        adds = not self._every and not (first and last)
        each = exchange.gradients_leave_each
        self._holds = holds and bool(exchange.copied)
        self._added = bool(exchange.copied) and (adds or exchange.copies_apart) and not each
        self.adds_copies = self._added and not self._holds
        """Gradients of copies are added to others as soon as a block has run."""
        self._made = exchange.summed if self._added else exchange.read
        """Bytes that are there of a gradient after its block, per byte of what is stepped."""
        self._summed = exchange.summed
        """They go after every backward, so that there are none to which to add."""
        self._grows = self._every or each or (first and not exchange.sums_into_zeros)
        self._leaves = exchange.gradients_are_freed and not exchange.packs
        """They go to the host, a block's together."""
        self._freed = exchange.gradients_are_freed
        self._way = way if self._leaves else None
        goes = self._every or each or (last and (exchange.packs or self._leaves))
        self.going: Mapping[int, list[int]] = group.complete if goes else {}
        """Block -> bytes of each bucket that goes after it."""
        self._newest = self._before = self._arrived = 0
        self._flew = () if first else group.flying
        for nbytes in self._flew:
            self._before, self._newest = self._newest, nbytes
        self.gradients = -self._newest - self._before
        """Whole ones that are there now, beside those that were before: of these, some were on
        their way."""
        whole = self._grows and not self._holds and exchange.made == 1.0
        self.come = self.adds_copies or whole
        """Whether gradients are there as ops make them, and not before."""
        self.copies = 0
        """Beside `gradients`: of copies, those that a block that runs makes."""
        self._beside = 0
        if last and exchange.last_forward:
            largest = max([bucket.nbytes for bucket in group.buckets], default=0)
            self._beside = self._shares(exchange.last_forward, largest)
        self.moving = self._beside + self._newest + self._before
        """On the way, or arrived while others are."""
        self.left = 0
        """Blocks of this micro-batch whose gradients have left for the host."""
        self._besides = exchange.beside_gradients if last else ()

    def _shares(self, sends: Sequence[Send], nbytes: int) -> int:
        """Flat tensors of what goes of a bucket beside its gradients, and what a rank gets."""
        found = 0.0
        for send in sends if nbytes else ():
            got = send.primitive is not Primitive.ALL_REDUCE and self._part(nbytes) / nbytes
            found += self._group.exchange.sent(send, nbytes) * (1 + got)
        return ceil(found)

    def there_bytes(self, index: int) -> int:
        """Bytes that are there of gradients before a block makes its own, as ops make them; more
        than any block has where that is not known."""
        group = self._group
        if index in group.again or group.exchange.made != 1.0:
            return sys.maxsize * (index in group.again or group.begins[index] > 0)
        return group.begins[index]

    def run(
        self,
        index: int,
        nbytes: int,
        one_op: int,
        adding: int | None = None,
        others_come: bool = False,
    ) -> int:
        """A block that needs so much beside what it saved; what it needs in all: more, by `adding`,
        where gradients are added to those that are there, or by the largest of the group if those
        of others are added to none (`others_come`). Where that is not known, or they are others
        than its ops make, the op that makes the largest is taken to have half of the most that any
        op of the block has (`one_op`)."""
        if self.adds_copies:
            self.copies = ceil(self._group.exchange.read * self.begun_by(index))
            return nbytes
        if self._grows:
            own = self._group.begins[index]
            self.gradients += own if self._made == 1.0 else ceil(self._made * own)
            if not (self._holds and self._added):
                again = self._group.again
                return max(nbytes, one_op // 2 + max(again[index])) if index in again else nbytes
        if self._holds:
            self.gradients += ceil(self._group.exchange.read * self._group.gradients[index])
            return nbytes
        beside = self._group.beside[index]
        if adding is not None and self._group.exchange.made == 1.0:
            return nbytes + (min(adding, beside) if others_come else adding * (beside > 0))
        more = one_op // 2 + beside
        return more if more > nbytes else nbytes

    def begun_by(self, index: int) -> int:
        """Bytes of the gradients that a block makes."""
        return self._group.begins[index] + sum(self._group.again.get(index, ()))

    def ran(self, index: int) -> int:
        """A block has run, and what it has saved is gone: gradients of copies are added to those of
        what is stepped. Returns what is there of them meanwhile: all, or one after the other where
        there is none to which to add."""
        there, self.copies = self.copies, 0
        if not self._grows:
            return there
        self.gradients += ceil(self._made * self._group.begins[index])
        beside = self._group.cast if self._made == 1.0 else self._group.beside
        return min(there, ceil(self._group.exchange.read * beside[index]))

    def _awaiting(self, index: int) -> int:
        """Gradients that are there after a block, and to which one before it will add."""
        ties = [one.nbytes for one in self._group.tied if one.readers[0] < index <= one.readers[-1]]
        return ceil(self._made * sum(ties))

    @property
    def goes_beside(self) -> bool:
        """Whether it is known how much of what goes has gone when a block is in its middle."""
        return bool(self._way)

    def reaches(self, index: int) -> None:
        """A block comes to where it has most at once."""
        if self._way:
            newest, before, _ = self._way[index]
            self.moving = min(self.moving, ceil(newest * self._newest + before * self._before))

    @property
    def opens(self) -> bool:
        """Whether gradients of a block have gone when parameters have come for the next one."""
        exchange = self._group.exchange
        return self._leaves and exchange.comes_from_host and exchange.gradients_leave_each

    def opened(self) -> None:
        """A block's parameters have come from the host when it was about to run; of groups of which
        gradients have gone meanwhile."""
        self.moving = 0

    @property
    def overtakes(self) -> bool:
        """Whether it has just waited for the last that left in the micro-batch before."""
        return self.left == 2 and len(self._flew) == 2

    def overtaken(self) -> None:
        """Another group has waited for what left after all that the micro-batch before had: of
        that, nothing is on its way."""
        if not self._flew:
            return
        if self.left <= 1:
            self.moving, self._before = self.moving - self._before, 0
        if self.left == 0:
            self.moving, self._newest = self.moving - self._newest, 0

    def sent(self, index: int) -> Iterator[None]:
        """A block has run: each time, something has been packed and goes."""
        sizes = self.going[index]
        for nbytes in [sum(sizes)] if self._every or self._leaves else sizes:
            share = self._made if self._leaves else self._summed
            sent = nbytes if share == 1.0 else ceil(share * nbytes)
            if not self._freed and (self._begins or not self._every):
                self._arrived += self._part(self._before)
            self._before, self._newest = self._newest, sent
            if self._leaves:
                self.left += 1
                before = 0 if self._group.exchange.comes_from_host else self._before
                late = self._way[index].at_end if self._way else LATE.at_end
                self.moving = self._newest + ceil(late * before)
                if self._group.at_once:
                    self.moving = 0
                self.gradients -= sent
                yield
                continue
            self.moving = (
                self._arrived + self._scattering(self._newest) + self._scattering(self._before)
            )
            self.moving += self._beside
            yield
            gone = nbytes if self._made == 1.0 else ceil(self._made * nbytes)
            if self._every:
                self.gradients = self._awaiting(index) if self._group.tied else 0
            else:
                self.gradients -= gone
            if self._besides and (more := self._shares(self._besides, nbytes)):
                # While an owner waits for all of it, another rank's part is there.
                self.moving += more + self._part(nbytes) * self._group.exchange.owns_whole
                yield
