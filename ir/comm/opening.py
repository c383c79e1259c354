"""What a process group costs to open and to hold open, on Gloo and on NCCL.

Gloo connects all with all as a group is made. NCCL makes a communicator at its first use: a ring of
its ranks on the host, and connections over the network where ranks of two nodes are neighbours in
a ring or a tree. What is said of NCCL are upper bounds, read from its sources (2.30); no GPU has
run them.
"""

from dataclasses import dataclass

OTHER_FILES = 64
"""That a rank's process has open besides: pipes and devices of its libraries, output, data."""
STORE_OPERATION_S = 2e-5
"""Of the store's one thread, per operation. Measured with a TCPStore on one core: 8 us to write a
value, 8 us for each that is read together with others; a share of the machine is taken off."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Of one group."""

    sockets: int
    """Of each member's process: connections, and what listens."""
    store_operations: int
    """Of all members together."""
    seconds: float
    """Of each member, besides its store operations."""


@dataclass(frozen=True, slots=True)
class GlooOpening:
    """All with all: a member listens, and reads the address of every one (counted)."""

    connection_s: float = 1e-3
    """Assumed; measured 15 to 50 ms for groups of 2 to 8 on one core, most of it waiting."""
    store_sockets: int = 2
    """Connections of a rank to the job's store: torch's, and that of who watches for failures."""

    def group(self, size: int) -> Opening:
        """Of a group of so many ranks."""
        return Opening(size, size * (1 + 2 * size), (size - 1) * self.connection_s)

    def pair(self) -> Opening:
        """Of two ranks that only send each other messages."""
        return self.group(2)


@dataclass(frozen=True, slots=True)
class NcclOpening:
    """A ring on the host, and channels over the network."""

    host_sockets: int = 5
    """Of the bootstrap: two that listen, to the next and from the one before; and the proxy's."""
    neighbours: int = 8
    """In rings and trees over the network: two, and a parent and two children twice."""
    channels: int = 16
    """Connections to each, one socket each over InfiniBand (assumed: the most of two per NIC)."""
    pair_channels: int = 2
    """Of messages between two ranks over the network (NCCL_NCHANNELS_PER_NET_PEER)."""
    base_s: float = 0.2
    """Assumed, for topology, rings and buffers."""
    step_s: float = 5e-5
    """Assumed, for a step round the ring, of which each of two gathers has one per rank."""
    staggered: int = 256
    """From so many ranks on they report to the first one at a limited rate."""
    reports_per_s: float = 7000.0
    store_sockets: int = 3
    """Besides the two of Gloo, that of torch's heartbeat."""

    def group(self, size: int) -> Opening:
        """Of a group of so many ranks, every two of which may be on two nodes."""
        sockets = self.host_sockets + min(size - 1, self.neighbours) * self.channels
        late_s = size / self.reports_per_s if size > self.staggered else 0.0
        return Opening(sockets, 2 * size, self.base_s + 2 * size * self.step_s + late_s)

    def pair(self) -> Opening:
        """Of two ranks that only send each other messages."""
        made = self.group(2)
        return Opening(self.host_sockets + self.pair_channels, made.store_operations, made.seconds)


def opening_on(device_kind: str) -> GlooOpening | NcclOpening:
    """Of the backend that devices of a kind have."""
    return GlooOpening() if device_kind == "cpu" else NcclOpening()
