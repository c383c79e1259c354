"""Rows of results that are kept in a file as they come: a run that was cut off goes on there."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class Rows:
    """One JSON object per line; kept nowhere without a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.held: dict[str, Row] = {}
        if path and path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.held[row["key"]] = row

    def once(self, key: Sequence[object], make: Callable[..., Any], *given: Any) -> Row:
        """The row of that key, made now of what is given unless there is one."""
        name = " ".join(map(str, key))
        if name not in self.held:
            made = make(*given)
            self.held[name] = {"key": name, **(made if isinstance(made, dict) else asdict(made))}
            if self.path:
                with self.path.open("a") as out:
                    out.write(json.dumps(self.held[name]) + "\n")
        return self.held[name]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints each row of a table as soon as there is one."""
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads), flush=True)
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
