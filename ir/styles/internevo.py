"""InternEvo's 7B_sft: gradients are all-reduced beside the backward in buckets of 512 MiB,
over all replicas whatever the ZeRO group is (hybrid_zero_optim.py: hooks reduce with reduce_rank
None); flash
attention 1, over which version 2 is about twice as fast (Dao 2023, abstract)."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, ZERO_ONLY, Style

STYLE = Style(
    title="InternEvo",
    libraries=2023,
    attention=2.0,
    all_reduces=True,
    bucket_bytes=512 * 2**20,
    variants=("plain",),
    kernels=("rms_norm", "swiglu", "rotary"),
    pins=(*ZERO_ONLY, "overlap=gradients"),
    # ZeRO's step flattens gradients in half precision (2 bytes a parameter; the adapter of FSDP,
    # fsdp_optimizer.py, does not) and casts them to float32 (4); torch's Adam of that time makes
    # the root and the denominator (4 + 4). ZeRO's are single tensors of several GB.
    memory=StackMemory(
        reserved=RESERVED,
        stepping=3.0,
        stepping_flat=0.5,
        stepping_apart=True,
    ),
    reference="InternEvo: configs/7B_sft.py, hybrid_zero_optim.py, doc/install.md",
)
