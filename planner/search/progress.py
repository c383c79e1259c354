"""Shows on stderr how a search goes: a live line on a terminal, one closing line elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.status import Status
from rich.text import Text

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.ir.text.terminal import Terminal
from meshwright.planner.search.plan_comparison import name_of

REFRESH_S = 0.1


class ProgressLine:
    """Use as a context; silent unless `show`."""

    def __init__(self, searcher: str, time_limit_s: float, *, show: bool) -> None:
        self.searcher = searcher
        self.time_limit_s = time_limit_s
        self.show = show
        self.console = Terminal(stderr=True)
        self.started = self.shown_at = time.monotonic()
        self.status: Status | None = None
        self.text = ""

    def __enter__(self) -> Self:
        if self.show and self.console.is_terminal:
            self.status = self.console.status(Text(f"search ({self.searcher}) ..."))
            self.status.start()
        return self

    def update(self, candidates: int, best: Plan | None, bound_s: float | None = None) -> None:
        """Tell how many candidates were judged, which leads, and what none can beat."""
        now = time.monotonic()
        if not self.show or (self.text and now - self.shown_at < REFRESH_S):
            return
        self.shown_at = now
        leader = "nothing fits yet"
        if best and best.predicted:
            leader = f"best {seconds(best.predicted.step_s)} per step: {name_of(best)}"
            if bound_s:
                leader += f", bound {seconds(bound_s)}"
        elapsed = now - self.started
        self.text = (
            f"search ({self.searcher}): {candidates:,} candidates, {leader}, "
            f"{elapsed:.0f} of {self.time_limit_s:.0f} s"
        )
        if self.status:
            self.status.update(Text(self.text))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status:
            self.status.stop()
        if self.show and self.text:
            self.console.print(self.text, markup=False, highlight=False)
