"""Who starts the ranks of a job: this machine alone, as a supervisor sees it."""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan import plan_io
from meshwright.running.all_starts import start_folder
from meshwright.running.memory_server import MemoryServer
from meshwright.running.ranks import JobEnd, Ranks
from meshwright.running.slow_ranks import Standings
from meshwright.running.spares import Spares
from meshwright.runtime.checkpoint import fence, node_memory
from meshwright.runtime.checkpoint.memory_place import MemoryPlace
from meshwright.runtime.checkpoint.node_memory import NodeMemory
from meshwright.runtime.world import launcher


@dataclass(frozen=True)
class JobStart:
    """One start of a job, the same for all of its machines."""

    number: int
    plan: str
    """Its JSON."""
    devices: tuple[int, ...]
    """Rank -> device, as the whole cluster counts them."""
    failures: tuple[str, ...] = ()
    """What ended those before, oldest first, since one that left as it was asked to."""
    token: str = ""
    """Of the lease of whoever leads, where there are several machines."""
    memories: tuple[MemoryPlace, ...] = ()
    """Of nodes that give theirs to others."""

    @property
    def name(self) -> str:
        """No other start of the job has it."""
        return f"{self.number:06d}-{self.token}"

    def dumps(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RankStarter:
    """Starts the ranks of one node of a cluster on this machine."""

    cluster: Cluster
    output: Path
    arguments: Sequence[str]
    """Of `meshwright run PLAN`, after the plan."""
    memory: Path | None = None
    """A folder for the newest state, in memory."""
    server: MemoryServer | None = None
    """Which gives it to other nodes."""
    copies: bool = True
    """Whether the next node has copies of what is in it."""
    as_json: bool = False
    """What ranks print goes to stderr."""
    spares: Spares | None = None
    lease: Path | None = None
    """The file of whoever leads, where there are several machines."""

    def devices_of(self, node: int) -> range:
        """Its devices, as the whole cluster counts them."""
        first = sum(len(other.devices) for other in self.cluster.nodes[:node])
        return range(first, first + len(self.cluster.nodes[node].devices))

    def ranks_of(self, start: JobStart, node: int) -> list[int]:
        """The ranks that are on a node."""
        ours = self.devices_of(node)
        return [rank for rank, device in enumerate(start.devices) if device in ours]

    def ranks(self, start: JobStart, node: int, store: TCPStore, asked: list[int]) -> Ranks:
        """Those of a node; to be entered."""
        folder = start_folder(self.output, start.number)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "plan.json"
        partial = folder / f"plan.json.{node}-{os.getpid()}"  # other nodes may write the same here
        partial.write_text(start.plan, encoding="utf-8")
        partial.replace(path)
        own, ours = self.ranks_of(start, node), self.devices_of(node)
        slots = [start.devices[rank] - ours.start for rank in own]
        kind = plan_io.loads(start.plan).cluster.device_kind
        shown = visible(slots) if kind == "cuda" else {}
        if self.memory is not None and self._all_remember(start):
            shown[node_memory.MEMORY] = self._memory_of(start, node, self.memory).dumps()
        if self.server is not None:
            self.server.accept(start.name)
        if self.lease is not None:
            shown |= fence.named_by(self.lease, start.token)
        arguments = ("-m", "meshwright", "run", str(path), *self.arguments, "-o", str(folder))
        return Ranks(
            len(start.devices), arguments, store, start.number, shown, asked,
            stdout=stdout_of_ranks(self.as_json), own=own, node=node, spares=self.spares,
        )  # fmt: skip

    def memory_at(self, node: int, host: str) -> MemoryPlace | None:
        """Where others reach this node's memory, if it gives it."""
        return None if self.server is None else self.server.place(node, host)

    def _all_remember(self, start: JobStart) -> bool:
        """Whether all nodes with ranks keep the newest state, as all ranks save there or none."""
        nodes = {n for n in range(len(self.cluster.nodes)) if self.ranks_of(start, n)}
        return len(nodes) == 1 or nodes <= {place.node for place in start.memories}

    def _memory_of(self, start: JobStart, node: int, folder: Path) -> NodeMemory:
        """Its neighbour is the next one that has ranks, in a ring."""
        others = tuple(place for place in start.memories if place.node != node)
        trains = [place.node for place in others if self.ranks_of(start, place.node)]
        after = [other for other in trains if other > node]
        neighbour = min(after or trains, default=-1) if self.copies else -1
        return NodeMemory(folder, start.name, node, neighbour, others)


def stdout_of_ranks(as_json: bool) -> int | None:
    """Where what ranks print goes, if not to the stdout of their supervisor."""
    return sys.stderr.fileno() if as_json else None


def visible(slots: Sequence[int]) -> dict[str, str]:
    """GPUs that ranks are to see: of those that this process sees, the ones that are left."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [known[slot] if slot < len(known) and known[slot] else str(slot) for slot in slots]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


class Crew(Protocol):
    """Machines that run a job's ranks."""

    def gather(self, asked: Sequence[int]) -> str:
        """Waits until enough of them are there; what is missing, if nobody comes."""

    def absent(self) -> set[int]:
        """Devices of machines that are not there."""

    def has_more(self, lost: Collection[int]) -> bool:
        """Whether a machine has come that does not take part yet, with devices that are not
        lost."""

    def run(
        self,
        start: JobStart,
        meanwhile: Callable[[], None],
        leave: Callable[[Standings], bool],
        asked: list[int],
    ) -> JobEnd:
        """Starts the ranks, does something meanwhile, and waits for their end; `leave` is asked
        whether they are to save and leave."""

    def end(self, code: int) -> None:
        """The job is over, with this exit code."""


@dataclass(frozen=True)
class OwnMachine:
    """This one alone."""

    starter: RankStarter

    def gather(self, asked: Sequence[int]) -> str:
        return ""

    def absent(self) -> set[int]:
        return set()

    def has_more(self, lost: Collection[int]) -> bool:
        return False

    def run(
        self, start: JobStart, meanwhile: Callable[[], None],
        leave: Callable[[Standings], bool], asked: list[int],
    ) -> JobEnd:  # fmt: skip
        # Each start has a store of its own: what earlier ranks wrote in theirs would mislead these.
        with self.starter.ranks(start, 0, launcher.open_store(), asked) as ranks:
            meanwhile()
            return ranks.wait(lambda: leave(ranks.standings))

    def end(self, code: int) -> None:
        pass
