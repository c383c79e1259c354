"""The console that everything is printed to: what a plan or a model says stays text there."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from meshwright.ir.text.plain_text import on_screen


class Terminal(Console):
    """A console on which square brackets and colons are no markup, and control characters of a
    text are written out. Styles are given as such, in code of ours."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of `renderable`, without any control of the terminal in their texts."""
        return _harmless(super().render(renderable, options))


def _harmless(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        if segment.control or (segment.text.isascii() and segment.text.isprintable()):
            yield segment
        else:
            yield Segment(on_screen(segment.text), segment.style)
