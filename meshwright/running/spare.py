"""A process that waits to become a rank: `python -m meshwright.running.spare`.

Most of what a small job takes to start is the import of torch and of this package. One that has
imported both reads a line of JSON, its environment and the arguments of `meshwright`, and is that
command from there on. Nothing of the user's is imported, and no device touched, before.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence


def order(environment: Mapping[str, str], arguments: Sequence[str]) -> bytes:
    """What a spare reads, once."""
    line = {"environment": dict(environment), "arguments": list(arguments)}
    return json.dumps(line).encode() + b"\n"


def main() -> None:
    """Waits for the line; without one, as when whoever started it is gone, it ends."""
    from meshwright import cli
    from meshwright.cli import run
    from meshwright.running import launch

    assert run and launch  # imported for what they import
    text = sys.stdin.buffer.readline()
    if not text.endswith(b"\n"):
        return
    given = json.loads(text)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.environ.update(given["environment"])
    sys.argv[1:] = given["arguments"]
    cli.main()


if __name__ == "__main__":
    main()
