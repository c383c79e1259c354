"""nanotron of early 2025 (src/nanotron): torch's operators one by one but for flash attention,
its rotary embedding and norm; fp32 gradient buffers.

A layer makes about 85 torch calls forward and 110 backward, launches four Triton kernels each way
and flash attention from Python (about 80 us each), and passes 15 modules and pipeline blocks: what
that takes beyond the operators themselves is an assumption. Its asynchronous linears make about 64
more calls a layer forward and 74 backward. ZeRO 1 is without DDP: the
whole fp32 buffer is all-reduced after the last backward (trainer.py: make_ddp,
reduce_scatter=False). Of the work beside collectives 0.4 hides them
(CUDA_DEVICE_MAX_CONNECTIONS=1): of 0, 0.4 and 1 what leaves the calibration runs at tp 2 to 32 and
at dp 16 to 256 closest together.
"""

from meshwright.ir.cluster.launching import Launching
from meshwright.ir.stack_memory import LateFrees, StackMemory
from meshwright.ir.styles import COLLECTIVE_S, RESERVED, ZERO_ONLY, Style

LATE = LateFrees(ahead_forward=1024 / 31, ahead_backward=1024 / 45)
"""torch 2.1 records what collectives read on their streams (run_multinode.sh). CUDA queues 1,024
launches; a layer with its asynchronous linears has 31 forward and 45 backward."""
STYLE = Style(
    title="nanotron",
    libraries=2024,
    launching=Launching(
        collective_s=COLLECTIVE_S, block_forward_s=1.0e-3, block_backward_s=1.1e-3,
        split_forward_s=0.38e-3, split_backward_s=0.44e-3,
    ),
    hides=0.4,
    # _ShardedCrossEntropy in float32: the largest (4 bytes read), what is less it (8), the
    # exponential (8), its sum (4), its quotient (8), and the gradient in place (8): 40, where
    # PyTorch's loss moves 8 forward and 16 backward.
    loss_bytes=16,
    all_reduces=True,
    late=("zero1", "zero2"),
    variants=("halves",),
    regathers=True,
    kernels=("rms_norm", "rotary"),
    pins=(*ZERO_ONLY, "overlap=gradients"),
    # Flash attention's RotaryEmbedding (2.5.0, layers/rotary.py) rotates queries in place.
    # optim/gradient_accumulator.py; distributed.py's all_gather_coalesced: a flat input, flat
    # outputs, and one more copy in torch's list form.
    memory=StackMemory(
        reserved=RESERVED, holds_gradients=True, bucket_copies=0.5, gathers=(1.0, 0.5),
        gathers_flat=0.5, keeps_packed=True,
        late=LATE,
    ),
    reference="nanotron: models/llama.py, parallel/tensor_parallel/functional.py, trainer.py; "
    "hf_ultrascale_scaling_and_bandwidth (calibration part)",
)  # fmt: skip
