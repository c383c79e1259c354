"""Which rows leave a cache first, one file a policy; the file name is its key. MESHWRIGHT_POLICIES
names folders with more.

A file has `make(rows, slots, counts)`, which makes a `Policy` for a table of so many rows, whose
`counts` are how often each occurs, as far as somebody has counted. With `NEEDS_COUNTS` it knows
nothing without them.
"""

import sys
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders

add_folders("MESHWRIGHT_POLICIES", __path__)
_FILES = Files(sys.modules[__name__], "policy of a cache")
POLICIES = _FILES.names
USUAL = "learnt"
"""The policy that is taken where nobody asks for one."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Policy(Protocol):
    """What a cache's slots hold, by worth. Rows and slots are given as numbers, each once."""

    def used(self, rows: Ints, at: Ints, times: Ints) -> None:
        """A batch looks up rows that are in slots `at`, each so many times."""

    def placed(self, rows: Ints, at: Ints) -> None:
        """Rows have come into slots, in the place of what was there; `used` may follow."""

    def worth(self, rows: Ints, at: Ints) -> npt.NDArray[np.int64] | Floats:
        """Returns a number for each slot: who has the smallest leaves first."""

    def cleared(self) -> None:
        """All slots are empty."""

    def grown(self, slots: int) -> None:
        """There are more slots."""


def policy(name: str, rows: int, slots: int, counts: Floats | None = None) -> Policy:
    """Makes a policy by its key for a table of `rows` rows; `counts`: how often each occurs, None
    where nobody knows. PlanError names the nearest known policy, or says that this one needs
    counts."""
    found = _FILES.load(name)
    if counts is not None and counts.shape != (rows,):
        raise PlanError(f"counts are of {len(counts):,} rows, and the table has {rows:,}")
    if counts is None and getattr(found, "NEEDS_COUNTS", False):
        raise PlanError(
            f"policy {name} keeps the rows that occur most, and nobody has counted them; give "
            f"rows=mw.count_rows(model, batches), or take policy {USUAL}"
        )
    return cast(Policy, found.make(rows, slots, counts))
