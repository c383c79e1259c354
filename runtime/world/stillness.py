"""Whether something still changes, told by looks: who was stopped himself has missed none.

A machine that pauses stops whoever looks and what he looks at alike, and clocks differ.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Stillness:
    """Of one thing that is looked at now and again."""

    seen: object = None
    """At the newest look."""
    looks: int = 0
    """The newest ones, in a row, that found what the look before had."""

    def look(self, now: object) -> int:
        """One more, which finds `now`; how many in a row have found the same."""
        self.looks = self.looks + 1 if now == self.seen else 0
        self.seen = now
        return self.looks
