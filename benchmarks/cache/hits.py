"""Which share of look-ups finds its row in a cache, by policy, beside what the rows that occur most
would give; and LRU and LFU beside libcachesim on the same trace.

python -m benchmarks.cache.hits [--rows 1000000] [--exponent 1.05] [--batches 200] [--judge PATH]

Ids are Zipf's, batches of 2,048. `drift`: a part of the ids changes places all the time, all do at
once now and then, or ids move on like new goods in a shop. `--judge`: where libcachesim is
installed (`pip install --target PATH libcachesim`); without it, it is looked for as any package is.
"""

import argparse
import sys

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from meshwright.forms.cache.policies import POLICIES, policy
from meshwright.forms.cache.slots import SlotMap
from meshwright.testing.hit_rate import hit_rate
from meshwright.testing.ids import DRIFTS, drifting, zipf_batches

Ints = npt.NDArray[np.int64]
SHARES = (0.01, 0.015, 0.05)
WARM = 0.7
BATCH = 2048
TRACE = 200_000


def steady(rows: int, exponent: float, batches: int) -> Table:
    """Returns hit rates where ids keep to one distribution."""
    trace, share = zipf_batches(rows, exponent, batches, BATCH, seed=0)
    order = np.argsort(-share)
    table = Table("cache", "most frequent", *POLICIES, "learnt from nothing", "over LFU",
                  title=f"{rows:,} rows, Zipf {exponent:g}, {batches} x {BATCH:,}")  # fmt: skip
    every = np.concatenate(trace)
    # As if as many look-ups had been counted before as are made now.
    counts = np.round(share * len(every))
    for part in SHARES:
        slots = round(part * rows)
        best = float(np.isin(every, order[:slots]).mean())
        warm = np.sort(order[: int(WARM * slots)])
        found = {
            name: hit_rate(name, trace, rows, slots,
                           share if name == "frequency" else counts, warm)
            for name in POLICIES
        }  # fmt: skip
        found["nothing"] = hit_rate("learnt", trace, rows, slots, None, warm)
        gain = 100 * (found["frequency"] - found["lfu"])
        table.add_row(
            f"{part:.1%}", f"{best:.4f}", *(f"{x:.4f}" for x in found.values()), f"{gain:.2f}"
        )
    return table


def drift() -> Table:
    """Returns hit rates where ids drift, and nobody has counted before."""
    rows, batches, batch = 20_000, 600, 256
    names = [name for name in POLICIES if name != "frequency"]
    table = Table("ids", "slots", *names, "learnt over LRU",
                  title=f"{rows:,} rows, {batches} x {batch}, mean of 3 seeds")  # fmt: skip
    for kind in DRIFTS:
        for slots in (600, 1000):
            found = {
                name: float(np.mean([
                    hit_rate(name, drifting(kind, seed, rows, batches, batch), rows, slots)
                    for seed in range(3)
                ])) for name in names
            }  # fmt: skip
            over = 100 * (found["learnt"] - found["lru"])
            rates = [f"{found[name]:.4f}" for name in names]
            table.add_row(kind, f"{slots:,}", *rates, f"{over:+.2f}")
    return table


def judged(path: str | None) -> Table | None:
    """Returns hits of one look-up after the other beside libcachesim's; None if it is not here."""
    if path:
        sys.path.append(path)
    try:
        import libcachesim  # type: ignore[import-not-found]
    except ImportError:
        return None
    rows = 20_000
    trace, _ = zipf_batches(rows, 1.05, TRACE // BATCH, BATCH, seed=1)
    ids = np.concatenate(trace)
    table = Table("policy", "slots", "hits here", "hits of libcachesim", "look-ups that differ",
                  title=f"{len(ids):,} look-ups of {rows:,} rows, Zipf 1.05")  # fmt: skip
    for name, kind in (("lru", libcachesim.LRU), ("lfu", libcachesim.LFU)):
        for slots in (100, 300, 2000):
            theirs = kind(slots)
            judge = [
                theirs.get(libcachesim.Request(obj_size=1, obj_id=int(row))) for row in ids.tolist()
            ]
            own = one_by_one(name, ids, rows, slots)
            differ = sum(a != b for a, b in zip(own, judge, strict=True))
            table.add_row(name, f"{slots:,}", f"{sum(own):,}", f"{sum(judge):,}", f"{differ:,}")
    return table


def one_by_one(name: str, ids: Ints, rows: int, slots: int) -> list[bool]:
    """Returns of each look-up whether it finds its row."""
    found, hits = SlotMap(rows, slots, policy(name, rows, slots)), []
    for row in ids.tolist():
        one = np.array([row])
        hits.append(found.slot_of[row] >= 0)
        found.admit(one)
        found.release(one)
    return hits


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--judge")
    given = parser.parse_args()
    console = Console(width=140)
    console.print(steady(given.rows, given.exponent, given.batches))
    console.print(drift())
    console.print(judged(given.judge) or "libcachesim is not installed: pass --judge")


if __name__ == "__main__":
    main()
