"""The store that `meshwright run` keeps for the ranks that it starts on a machine.

It outlives them, whichever dies; and what they tell each other of failures it reads there itself.
"""

import os
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from meshwright.ir.torch_private import RESTARTS

STARTED = "MESHWRIGHT_STARTED"
"""Environment variable of ranks: how often the job was started before, if `meshwright run` did."""
_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=30)


def open_store() -> TCPStore:
    """A store on a port that the system chooses, which lives as long as what comes back."""
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def told(store: Any, started: int) -> Any:
    """The part of it in which ranks that were started so often tell of themselves."""
    return PrefixStore(f"meshwright/started/{started}", store)


def environment(store: TCPStore, rank: int, world_size: int, started: int) -> dict[str, str]:
    """What a rank reads: as torchrun sets it, so that ranks meet in the store."""
    size = str(world_size)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0", "MASTER_ADDR": _HOST, "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": f"meshwright-{os.getpid()}",
        RESTARTS: str(started), STARTED: str(started),
    }  # fmt: skip


def launcher_store() -> Any:
    """A rank's connection to that part, if `meshwright run` started it."""
    if (started := os.environ.get(STARTED)) is None:
        return None
    port = int(os.environ["MASTER_PORT"])
    return told(TCPStore(_HOST, port, is_master=False, timeout=_TIMEOUT), int(started))
