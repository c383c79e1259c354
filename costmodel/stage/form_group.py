"""Parameters of a stage that one form keeps and synchronises: most stages have one such group."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.costmodel.stage.buckets import Bucket
from meshwright.costmodel.stage.replica_lines import ALONE, ReplicaLines
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Send


@dataclass(frozen=True)
class FormGroup:
    """One group on a rank."""

    exchange: Exchange
    buckets: tuple[Bucket, ...]
    gathered: tuple[int, ...]
    """Per block: bytes of its parameters, whole."""
    frozen: tuple[int, ...] = ()
    """Of those, bytes of parameters that are not trained; empty: none."""
    still: frozenset[int] = frozenset()
    """Blocks that have no backward: nothing is gathered for one."""
    trained: tuple[int, ...] = ()
    """Per block: bytes of those to whose gradients it is the last to add; empty where there is no
    other group."""

    lines: ReplicaLines = ALONE
    """The ranks that agree on them."""
    state: float = 0
    """Values that the optimizer keeps per value."""

    @property
    def shards(self) -> int:
        """Ranks that share what is split."""
        return self.lines.shards

    def part_of(self, send: Send, nbytes: float) -> float:
        """What goes of a unit of so many bytes."""
        return nbytes / self.shards if send.of_part else nbytes

    @cached_property
    def owned(self) -> dict[int, list[Bucket]]:
        """Block -> buckets that are complete after its backward."""
        found: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            found.setdefault(bucket.owner, []).append(bucket)
        return found

    def fetched(self, send: Send) -> Sequence[int]:
        """Bytes that are gathered before each block's forward, or before its backward."""
        if send.at is not Event.BEFORE_BACKWARD or not self.still:
            return self.gathered
        return [nbytes * (i not in self.still) for i, nbytes in enumerate(self.gathered)]

    @cached_property
    def filled(self) -> dict[int, list[Bucket]]:
        """Block -> buckets of whose parameters it is the last to read one."""
        found: dict[int, list[Bucket]] = {}
        own = [block for block, nbytes in enumerate(self.gathered) if nbytes]
        for bucket in self.buckets:  # from the last block on
            last = max(own[-1] if own else 0, bucket.owner)
            found.setdefault(last, []).append(bucket)
            own = [block for block in own if block < bucket.owner]
        return found

    @property
    def message_bytes(self) -> list[int]:
        """Of all that goes."""
        sizes = [bucket.nbytes for bucket in self.buckets]
        return sizes + list(self.gathered) if self.exchange.fetches else sizes

    def adds_to_none(self, *, last: bool) -> bool:
        """Whether a backward has no gradients to which to add its own. There never are any where
        they go after each backward, and else none before the first, unless they are summed into
        zeros. The last backward stands for the first: a step has one of each."""
        exchange = self.exchange
        return not (exchange.keeps_whole_gradients and (exchange.sums_into_zeros or not last))
