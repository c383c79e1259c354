"""InternEvo's 7B_sft: gradients are all-reduced beside the backward in buckets of 512 Mi values
(hybrid_zero_optim.py counts elements), over all replicas whatever the ZeRO group is (its hooks
reduce with reduce_rank None); flash attention 1, over which version 2 is about twice as fast (Dao
2023, abstract)."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, ZERO_ONLY, Style

STYLE = Style(
    title="InternEvo",
    libraries=2023,
    attention=2.0,
    all_reduces=True,
    bucket_bytes=4 * 512 * 2**20,  # what is stepped has four bytes a value
    # broadcast_params: a broadcast for each rank that owns parameters, of whole ones. A hop of a
    # ring over NVLink takes 3.4 us by NCCL's own table (src/graph/tuning.cc, Ring, Simple).
    chain_hop_s=3.4e-6,
    variants=("plain",),
    kernels=("rms_norm", "swiglu", "rotary"),
    pins=(*ZERO_ONLY, "overlap=gradients"),
    # ZeRO's step flattens gradients in half precision (2 bytes a parameter) and casts them to
    # float32 (4); torch's Adam of that time makes the root and the denominator (4 + 4). These are
    # single tensors of several GB. Two flat buckets are there at once (_reduce_grads_by_rank).
    memory=StackMemory(
        reserved=RESERVED,
        stepping=3.0,
        stepping_flat=0.5,
        stepping_apart=True,
        flat_alone_bytes=2 * 2 * 512 * 2**20,
    ),
    reference="InternEvo: configs/7B_sft.py, hybrid_zero_optim.py, doc/install.md",
)
