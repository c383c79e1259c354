"""Who measures collectives is told of them through this; nobody has to."""

from typing import Any, Protocol


class Meter(Protocol):
    """Times are marks: seconds on CPU, events on a GPU."""

    def mark(self) -> Any:
        """Now."""
        ...

    def block_collective(
        self,
        stage: int,
        axis: str,
        primitive: str,
        nbytes: int,
        size: int,
        start: Any,
        blocked: Any = None,
    ) -> None:
        """A collective of a block that began at `start` is over; `nbytes` is the whole value. If it
        went on beside other work, the rank has waited for it since `blocked`."""
        ...
