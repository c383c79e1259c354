"""A time limit of a search holds for the trace before it, too."""

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.ir.deadline import TimeUp, busy_for
from meshwright.ir.errors import TraceError

LEAST_S = 30.0
"""A trace may take so long whatever the limit is: without a graph a search can leave no plan."""


@contextmanager
def traced_within(time_limit_s: float) -> Iterator[None]:
    """Inside, a trace that computes for longer than a search may take, and than `LEAST_S`, is a
    TraceError."""
    most_s = max(time_limit_s, LEAST_S)
    try:
        with busy_for(most_s):
            yield
    except TimeUp as error:
        raise TraceError(
            f"tracing the model takes longer than {most_s:g} s, and there is no plan without a "
            f"graph: nearest is a time limit of {2 * most_s:g} s (--time-limit {2 * most_s:g}); a "
            "graph that `mw.trace` has made needs none"
        ) from error
