"""The store that `meshwright run` keeps for the ranks that it starts, here or on several machines.

It outlives them, whichever dies; and what they tell each other of failures it reads there itself.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from meshwright.ir.torch_private import RESTARTS
from meshwright.runtime.world.silence import notice_silence

STARTED = "MESHWRIGHT_STARTED"
"""Environment variable of ranks: how often the job was started before, if `meshwright run` did."""
_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=30)


def open_store(host: str = _HOST) -> TCPStore:
    """A store on a port that the system chooses, which lives as long as what comes back. Ranks on
    other machines reach it as `host`."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def connected(host: str, port: int, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A connection to a store that another process has opened; DistError if there is none, and
    whenever its machine is gone."""
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    notice_silence(store)
    return store


def told(store: Any, started: int) -> Any:
    """The part of it in which ranks that were started so often tell of themselves."""
    return PrefixStore(f"meshwright/started/{started}", store)


def environment(
    store: TCPStore, rank: int, world_size: int, started: int, *, own: Sequence[int], node: int
) -> dict[str, str]:
    """What a rank reads: as torchrun sets it, so that ranks meet in the store. `own` are the ranks
    of its machine, which is number `node`."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(own.index(rank)), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(own)), "GROUP_RANK": str(node),
        "MASTER_ADDR": store.host, "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": f"meshwright-{os.getpid()}",
        RESTARTS: str(started), STARTED: str(started),
    }  # fmt: skip


def launcher_store() -> Any:
    """A rank's connection to that part, if `meshwright run` started it."""
    if (started := os.environ.get(STARTED)) is None:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return told(connected(host, port), int(started))
