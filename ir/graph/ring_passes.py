"""What a ring of attention moves in memory around its messages, and how many operators do it, on
its busiest rank: counted in `codegen/attention/ring.py`."""

from dataclasses import dataclass

from meshwright.ir.layout.op_messages import Passes


@dataclass(frozen=True, kw_only=True)
class RingPart:
    """A rank's part of the values of an attention that goes round, and how it lies."""

    ranks: int
    sections: int
    """Runs of the sequence that a rank has."""
    zigzag: bool
    causal: bool
    item: int
    """Bytes of an element; sums are at least as wide as float32."""
    queries: float
    """Elements of a rank, as of the next two."""
    keys: float
    """With values."""
    results: float
    rows: float
    """Of results."""
    heads: float
    """Of queries, for each of keys."""

    @property
    def passes(self) -> Passes:
        return Passes(
            round(self._forward_bytes), round(self._backward_bytes), self._forward_calls,
            self._backward_calls,
        )  # fmt: skip

    @property
    def _wide(self) -> int:
        return max(self.item, 4)

    @property
    def _cast(self) -> int:
        """Bytes of an element that is cast to the width of sums, or from it."""
        return self.item + self._wide if self.item < self._wide else 0

    @property
    def _own(self) -> float:
        """Times that what is a rank's own is attended to, run by run."""
        return (self.sections + 1) / 2 if self.causal else 1.0

    @property
    def _parts(self) -> float:
        """Times that queries go through the kernel."""
        return self._own + self.ranks - 1

    @property
    def _parts_of_keys(self) -> float:
        """In zigzag the last rank's queries, all of them, meet one half of what each of the others
        has."""
        half = 0.5 if self.causal and self.zigzag else 1.0
        return self._own + half * (self.ranks - 1)

    @property
    def _pieces(self) -> int:
        """Calls of the kernel."""
        return (2 * self.sections - 1 if self.causal else 1) + self.ranks - 1

    @property
    def _first(self) -> int:
        """Those whose results are added to nothing."""
        return self.sections if self.causal else 1

    @property
    def _packed(self) -> float:
        """Bytes to put keys and values into a message."""
        return 2 * self.item * self.keys

    @property
    def _laid(self) -> float:
        """Bytes per element to lay queries of one head of keys side by side, where it has several;
        those up to their own place get a head of keys each."""
        return 2 * self.item * (self._parts - self.causal) * (self.heads > 1)

    @property
    def _headed(self) -> float:
        """Bytes to make these heads of keys, or to add up their gradients."""
        several = self.causal and self.heads > 1
        return self.item * self.keys * (1 + self.heads) * several

    @property
    def _forward_bytes(self) -> float:
        sums = self._wide * (3 + 3 * (self._parts - 1))  # zeros, the first in their place, others
        casts = self._cast * (self._parts + 1)
        totals = self.rows * self._wide * (12 * (self._parts - 1) + 3)
        laid = self._laid * self.queries + self._headed
        return self._packed + self.results * (sums + casts) + totals + laid

    @property
    def _backward_bytes(self) -> float:
        zeros = self._wide * (self.queries + self.ranks * self.keys)
        home = 3 * self._wide * (self.ranks - 1) * self.keys
        laid = self._laid * (self.queries + 2 * self.results) + 2 * self._headed
        found = self._packed + zeros + home + laid
        for values, times in ((self.queries, self._parts), (self.keys, self._parts_of_keys)):
            found += values * (3 * self._wide * times + self._cast * (times + 1))
        return found

    @property
    def _forward_calls(self) -> int:
        """The kernel's but for the first, which is the operator itself."""
        pieces, first = self._pieces, self._first
        found = 4 + 2 * first + 7 * (pieces - first) + pieces - 1
        found += (pieces + 2) * bool(self._cast)
        return found + (pieces + self.causal * first) * (self.heads > 1)

    @property
    def _backward_calls(self) -> int:
        pieces = self._pieces
        found = 3 + 2 * self.ranks + 3 * pieces + pieces - 1 + pieces * (self.sections > 1)
        found += (3 * pieces + 6) * bool(self._cast)
        return found + (3 * pieces + 2 * self.causal * self._first) * (self.heads > 1)
