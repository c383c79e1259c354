"""BLOOM's Megatron-DeepSpeed of February 2022, a fork of Megatron-LM 2.4. Its script sets
CUDA_LAUNCH_BLOCKING, without which jobs of 320 GPUs and more hung: by the source's own comparison
on 80 GPUs that costs 3.5 ms for each layer and micro-batch, of which the operators' own dispatch is
1.0."""

from dataclasses import replace

from meshwright.ir.cluster.launching import Launching
from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import COLLECTIVE_S, RESERVED
from meshwright.ir.styles.megatron_2021 import STYLE as MEGATRON

STYLE = replace(
    MEGATRON, title="Megatron-DeepSpeed of 2022", libraries=2022,
    launching=Launching(
        collective_s=COLLECTIVE_S, block_forward_s=0.8e-3, block_backward_s=0.9e-3, waits=True
    ),
    # runtime/pipe/p2p.py: dist.send and dist.recv, which the stream waits for.
    blocking_sends=True, parts_borders=False, pins=(*MEGATRON.pins, "saved=none"),
    # zero/stage_1_and_2.py flattens a rank's gradients and casts them (2 + 4 bytes a parameter),
    # takes norms in double precision, and reduces in buckets of 5e8 values.
    memory=StackMemory(
        reserved=RESERVED, stepping=1.5, norms=2.0, stepping_bytes=10**9, stepping_apart=True,
    ),
    reference="bigscience, train/tr11-176B-ml; Megatron-DeepSpeed, runtime/pipe/engine.py",
)  # fmt: skip
