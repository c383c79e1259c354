"""InternEvo's 7B_sft: gradients are all-reduced beside the backward in buckets of 512 MiB,
over all replicas whatever the ZeRO group is (hybrid_zero_optim.py: hooks reduce with reduce_rank
None); flash
attention 1, over which version 2 is about twice as fast (Dao 2023, abstract)."""

from meshwright.ir.styles import ZERO_ONLY, Style

STYLE = Style(
    title="InternEvo",
    libraries=2023,
    attention=2.0,
    all_reduces=True,
    bucket_bytes=512 * 2**20,
    variants=("plain",),
    kernels=("rms_norm", "swiglu", "rotary"),
    pins=(*ZERO_ONLY, "overlap=gradients"),
    reference="InternEvo: configs/7B_sft.py, hybrid_zero_optim.py, doc/install.md",
)
