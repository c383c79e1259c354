"""Only ranks of the supervisor that leads their job keep a checkpoint.

Where a job has several nodes, whoever leads holds a file on the disk that all of them see, and its
ranks know the token in it. Ranks that were stopped, or cut off, while another node began to lead
find another token there, and leave what that one's ranks save as it is.
"""

import os
from pathlib import Path

from meshwright.ir.errors import PlanError

HELD = "MESHWRIGHT_HELD"
"""Environment variable of ranks: TOKEN:PATH of that file."""
_LONGEST = 64


def named_by(path: Path, token: str) -> dict[str, str]:
    """What ranks need in their environment."""
    return {HELD: f"{token}:{path}"}


def token_of(content: bytes) -> str:
    """Whose the file is, by what is in it: a token, a space and a count."""
    return content.partition(b" ")[0].decode("ascii", "replace")


def check_held() -> None:
    """PlanError if the file is another one's by now; nothing in a job that has none."""
    token, _, path = os.environ.get(HELD, "").partition(":")
    if not token:
        return
    with Path(path).open("rb") as file:
        found = token_of(file.read(_LONGEST))
    if found != token:
        raise PlanError(
            f"{path}: another node leads this job by now, and its ranks save; these do not"
        )
