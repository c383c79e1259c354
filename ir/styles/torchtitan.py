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
    # foreach_reduce; pytorch pull request 129721), and has what is no layer in the root's group,
    # which stays gathered (parallelize_llama.py; _fsdp_state.py, _lazy_init). A loss that is not
    # compiled adds two float32 temporaries where classes are split
    # (torch.distributed.tensor.parallel.loss): the exponential and a sum, less the one that it
    # ends in. It casts logits, which train.py lets go of before the backward. torch's pipelines
    # keep the logits of all micro-batches (pipelining/stage.py, output_chunks), and what they send
    # until its backward (fwd_cache).
    memory=StackMemory(
        reserved=RESERVED, split_loss_bytes=14, gradients_apart=True, gathers_rest=True,
        loss_hole_bytes=2, kept_output_bytes=2, keeps_sent=True,
    ),
    reference="torchtitan docs/fsdp.md; wheels of torch of that time; torch.utils.checkpoint, "
    "which without reentry stops early (set_checkpoint_early_stop)",
)  # fmt: skip
