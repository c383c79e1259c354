"""Rows of a table that a rank has for a batch, and where the ids of the batch find them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NamedRows:
    """What the ids of a batch name."""

    rows: Tensor
    """Each once, ascending."""
    ids: Tensor | None = None
    """As the batch has them, [look-ups]; None: nobody needs them later."""
    places: Tensor | None = None
    """Of each id, its row among `rows`."""

    @classmethod
    def of(cls, ids: Tensor, count: int) -> "NamedRows":
        """Finds rows of a table of `count` rows; ids outside of it are of none. Where ids lie on
        the host, comparing them later takes less than looking for them again; a GPU would be waited
        for."""
        if ids.device.type != "cpu":
            found: Tensor = ids.unique()  # type: ignore[no-untyped-call]
            return cls(found[(found >= 0) & (found < count)])
        # Its sort takes half as long as torch's.
        distinct, places = np.unique(ids.numpy(), return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < count:
            return cls(torch.from_numpy(distinct[(distinct >= 0) & (distinct < count)]))
        # A copy: whoever has the batch may write the next one over it.
        return cls(torch.from_numpy(distinct), ids.clone(), torch.from_numpy(places))


@dataclass(eq=False)
class RowsHere:
    """Rows that blocks have of a table."""

    path: str
    named: NamedRows
    _next: int = field(default=0, init=False)
    """Of the batch's ids, the first that nobody has looked up."""

    @property
    def rows(self) -> Tensor:
        """Their numbers, ascending."""
        return self.named.rows

    def has(self, ids: Tensor, count: int) -> bool:
        """Tells whether all rows that ids [look-ups] name in a table of `count` rows are here."""
        known = self.named.ids
        if known is not None and ids.device == known.device and torch.equal(known, ids):
            return True
        if not len(self.rows):
            return not bool(((ids >= 0) & (ids < count)).any())
        places = torch.searchsorted(self.rows, ids).clamp_(max=len(self.rows) - 1)
        # What is no row is refused where it is looked up.
        return bool(((self.rows[places] == ids) | (ids < 0) | (ids >= count)).all())

    def places(self, indices: Tensor) -> Tensor:
        """Returns where rows that indices name stand among those that are here, in their shape."""
        found = self._known(indices.flatten())
        if found is not None:
            return found.view(indices.shape).to(indices.dtype)
        rows = self.rows
        found = torch.searchsorted(rows, indices)
        known = rows[found.clamp(max=len(rows) - 1)] == indices if len(rows) else found < 0
        # A rank has asked for all that its inputs name: what is not among those is no row.
        torch._assert_async(known.all(), f"an index of {self.path} is out of range")
        return found.to(indices.dtype)

    def _known(self, ids: Tensor) -> Tensor | None:
        """Places of ids that are the batch's next ones, or its first: micro-batches come in order.
        None where they are others."""
        known, places = self.named.ids, self.named.places
        if known is None or places is None or ids.device != known.device or not len(ids):
            return None
        for start in dict.fromkeys((self._next, 0)):
            stop = start + len(ids)
            if stop <= len(known) and torch.equal(known[start:stop], ids.long()):
                self._next = stop
                return places[start:stop]
        return None
