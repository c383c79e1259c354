"""nanotron whose launch script sets TORCH_DISTRIBUTED_DEBUG=DETAIL
(examples/mamba/run_multinode.sh): torch compares each collective's fingerprint over Gloo before it
starts it, about four messages one after the other per further rank. Two processes of a small
machine took 0.43 ms for it while others worked, and four messages at their best 0.15 ms: the
middle."""

from dataclasses import replace

from meshwright.ir.styles.nanotron import LATE
from meshwright.ir.styles.nanotron import STYLE as UNCHECKED

STYLE = replace(
    UNCHECKED,
    title="nanotron with checked collectives",
    launching=replace(UNCHECKED.launching, check_s=0.3e-3),
    memory=replace(UNCHECKED.memory, late=replace(LATE, in_step=True)),
)
