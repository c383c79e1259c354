"""torchtitan with FSDP2: torch's operators one by one, or compiled where the plan says so."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, Style

STYLE = Style(
    title="torchtitan",
    beside_replicas=True,
    libraries=2024,
    balanced=True,
    stops_early=True,
    variants=("halves",),
    # FSDP2 makes reduced gradients on the stream that reduces them (_fsdp_collectives.py,
    # foreach_reduce; pytorch pull request 129721). A loss that is not compiled adds two float32
    # temporaries where classes are split (torch.distributed.tensor.parallel.loss): the
    # exponential and a sum, less the one that it ends in.
    memory=StackMemory(reserved=RESERVED, split_loss_bytes=14, gradients_apart=True),
    reference="torchtitan docs/fsdp.md; wheels of torch of that time; torch.utils.checkpoint, "
    "which without reentry stops early (set_checkpoint_early_stop)",
)
