"""Room for a process's sockets among the files that it may have open."""

import resource

from meshwright.ir.comm.opening import OTHER_FILES
from meshwright.ir.errors import MismatchError


def make_room(sockets: int) -> None:
    """Lets this process have so many sockets: a process may raise its own limit up to the one that
    its system sets. MismatchError if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sockets + OTHER_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise MismatchError(
            f"this rank's groups take {sockets} sockets, and a process may have {hard} files open "
            f"here; set ulimit -n {needed} before the job starts, or run a plan whose groups are "
            "smaller"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def most_open() -> int:
    """Files that a process on this machine may have open, once it has raised its own limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if hard == resource.RLIM_INFINITY else hard
