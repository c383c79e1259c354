"""What each training stack does, from its documentation or source; nothing here is fitted.

Every record names where its facts come from. A table or row picks a stack by its words.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.published.efa import checked
from benchmarks.published.measured import RowError
from benchmarks.published.rows import Row

Attention = Literal["flash", "unfused"]
Sync = Literal["ddp", "end", "fsdp"]
Style = Literal["fused", "eager", "compiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One stack."""

    name: str
    parameter_bytes: int
    """Per parameter, on every rank under ZeRO 0-2; the compute copy."""
    gradient_bytes: int
    optimizer_bytes: int
    """Master weights and moments."""
    sync_bytes: int
    """Per gradient value on the wire."""
    gradient_sync: Sync
    """ddp: buckets while the last backward runs; end: after it; fsdp: per layer, with gathers."""
    accumulate_bytes: int
    """Moved per parameter and micro-batch beyond what the weight-gradient kernels write."""
    attention: Attention
    pointwise: Style
    """fused: one kernel each for norm, gated or biased activation and dropout-add; eager: torch
    operators one by one; compiled: torch.compile or XLA fuse what lies between matmuls."""
    dropout: bool
    sequence_parallel: bool
    tp_overlap: Literal["none", "backward", "nanotron", "userbuffers"]
    """backward: the input gradient's collective runs beside the weight gradient (Megatron's
    asynchronous all-reduce); nanotron: its asynchronous linears; userbuffers: Transformer
    Engine's, where a row says that tp overlaps."""
    logits_bytes: int
    """Per token and vocabulary entry at the worst moment of the loss."""
    saved_logits_bytes: int
    """Of these, what is kept until the head's backward."""
    bucket_bytes: int = 0
    """Per parameter, kept beside the gradients where torch DDP wraps the model (dp > 1, ZeRO-0)."""
    half_gradients: bool = False
    """A whole backward's gradients are there in half precision before the fp32 buffer sums them."""
    attention_slowdown: float = 1.0
    """Of its flash attention over the preset's, which is version 2."""
    current_libraries: bool = False
    """It runs in the vendor's containers of the time that the presets' kernels were measured."""
    step_bytes: int = 0
    """Per updated parameter while the optimizer runs."""
    flat_bytes: int = 0
    """The same where ZeRO 0-2 flattens gradients into one tensor for the optimizer."""
    step_table_bytes: int = 0
    """Per value of the embedding, as the largest tensor: what its norm is taken of."""
    step_buffer_bytes: int = 0
    """For the gradients on their way."""
    step_apart: bool = False
    """Its tensors are larger than the blocks that activations leave, which the allocator cannot
    join: both stay reserved."""
    gather_copies: bool = False
    """Gathering the updated parameters flattens input and output and copies once more inside
    all_gather: 4 + 2/shard bytes per parameter."""
    rotates_in_place: bool = False
    """Queries, inside the tensor that the packed projections were laid out in."""
    frees_late: bool = False
    """What tensor parallelism's reduce-scatters read is free only once the GPU has sent it."""
    plain_linears: bool = False
    """Under tensor parallelism too linears are torch's own, between collectives."""
    keeps_gathered: bool = False
    """Inputs that sequence parallelism gathered are kept, not gathered again in backward."""
    casts_once: bool = False
    """Float8 as Transformer Engine casts to it."""
    stops_early: bool = False
    """A checkpointed layer is made again up to what backward reads: not its last product."""
    layer_dispatch_s: tuple[float, float] = (0.0, 0.0)
    """The CPU's part of one layer forward and backward beyond a dispatch per kernel and its
    collectives, where the layer is known to make many small calls."""
    tp_dispatch_s: tuple[float, float] = (0.0, 0.0)
    """The same for what tensor parallelism makes of the layer's linears."""
    hidden: float = 1.0
    """Share of the work beside its collectives that hides them."""
    bucket: int = 0
    """Bytes in half precision that are reduced at once; 0: taken as all."""
    check_s: float = 0.0
    """The CPU's per collective for each further rank of its group."""
    clip_bytes: int = 0
    """Moved per parameter to clip the gradients' norm."""
    gather_parameters: bool = True
    """ZeRO 1-2 gathers the updated parameters after the step."""
    blocks_launches: bool = False
    """The CPU waits for every kernel (CUDA_LAUNCH_BLOCKING): nothing hides what it takes."""
    sends_wait: bool = False
    """A stage computes nothing while it sends and receives."""
    sends_parts: bool = False
    """Between stages each tensor-parallel rank sends its part, and receivers gather: Narayanan et
    al. 2021, section 4.1; Alpa (OSDI 2022), section 6, local all-gather."""
    broadcasts: bool = False
    """It does so by one broadcast per rank of the group."""
    reduces_all: bool = False
    """Under ZeRO 1-2 as well gradients are all-reduced over all replicas."""
    bucket_copy_bytes: int = 0
    """Moved per parameter and step to flatten gradients into buckets and to copy them back."""
    update_bytes: int = 0
    """Moved per updated parameter beyond what a fused Adam moves."""
    whole_parameters: bool = False
    """ZeRO 1-2 deals whole parameters to ranks: one of them updates all of the embedding."""
    loss_bytes: tuple[int, int] = (38, 14)
    """Moved per logit forward and backward. Eager: cast (2+4 bytes), maximum (4), subtract (8),
    exponential (8), sum (4), divide (8); backward in place (8) and cast (6)."""
    one_hot_experts: int = 0
    """Tokens per group that the experts' one-hot dispatch is made for; 0: tokens are moved."""
    relays_experts: bool = False
    """ZeRO splits experts' weights by the dim after the experts, which collectives want outermost
    and products do not: all of them are copied beside each gather and each reduction."""
    reduces_at_once: bool = False
    """All gradients are reduced by one collective at the end; until then they are there whole."""
    separate_qkv: bool = False
    composite_norm: bool = False
    """RMSNorm is made of several torch operators."""
    full_stages: bool = False
    """As many layers on every stage but the last, which gets the rest."""
    cost_partition: bool = False
    """Stages balanced by nanotron's block costs, in which the head counts and the rest is cut at
    cumulative thresholds; otherwise equal numbers of layers."""
    first_stage_memory: bool = False
    """Memory is what the rank of the first stage logged, not the fullest rank's."""
    vocab_multiple: int = 1
    """The vocabulary is padded to this times tp."""
    schedule: str = "one_f_one_b"


# Mixed precision with fp32 main gradients: Megatron-LM, megatron/optimizer (2 + 4 + 12 bytes).
# Fused kernels: --no-masked-softmax-fusion and --no-bias-gelu-fusion are off by default.
# SC21 ran before the asynchronous all-reduce of the input gradient (added in 2021-12 with
# gradient-accumulation fusion) and reduced gradients after the last micro-batch (DDP local).
MEGATRON_2021 = System(
    name="Megatron-LM 2021", parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12,
    sync_bytes=4, gradient_sync="end", accumulate_bytes=4, attention="unfused",
    pointwise="fused", dropout=True, sequence_parallel=False, tp_overlap="none",
    logits_bytes=10, saved_logits_bytes=4, vocab_multiple=128, schedule="interleaved",
    sends_parts=True,
)  # fmt: skip

# Korthikanti et al. 2022, section 6: same stack a year later, with asynchronous all-reduce and
# fused weight-gradient accumulation.
MEGATRON_2022 = System(
    name="Megatron-LM 2022", parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12,
    sync_bytes=4, gradient_sync="end", accumulate_bytes=2, attention="unfused",
    pointwise="fused", dropout=True, sequence_parallel=False, tp_overlap="backward",
    logits_bytes=10, saved_logits_bytes=4, vocab_multiple=128, schedule="interleaved",
    sends_parts=True,
)  # fmt: skip

# nanotron (src/nanotron of early 2025): bf16 parameters, fp32 gradient buffer, fp32 master weights
# and moments (optim/gradient_accumulator.py); with ZeRO-0 torch DDP keeps bf16 buckets as well and
# its hook all-reduces in fp32 beside the backward; with ZeRO-1 and fp32 accumulation there is no
# DDP, so the whole fp32 buffer is all-reduced after the last backward (trainer.py: make_ddp,
# reduce_scatter=False). Loss: bf16 logits cast to fp32, sharded cross entropy subtracts into a
# second fp32 tensor that it keeps (parallel/tensor_parallel/functional.py). A layer makes about 85
# torch calls forward and 110 backward (models/llama.py; 6 us each, the preset's dispatch), launches
# four Triton kernels each way and flash attention from Python (about 80 us each), and passes 15
# modules and pipeline blocks; these times are assumptions. ZeRO-1 gathers parameters by
# nanotron/distributed.py's all_gather_coalesced: a flat input, flat outputs, and one more copy in
# torch's list form; the sweep's own column of static memory has them (10 + 14/dp bytes).
# Its asynchronous linears (parallel/tensor_parallel/functional.py) make about 64 more calls a layer
# forward and 74 backward, at the same 6 us: buffers, splits, views, partial products. They gather
# inputs into a buffer that all share, again in the backward (tp_recompute_allgather): the static
# memory of the sweep's runs has two such buffers. Of the work beside collectives, of tensor and of
# data parallelism, 0.4 hides them (CUDA_DEVICE_MAX_CONNECTIONS=1 makes streams wait for each
# other): of 0, 0.4 and 1 it leaves the calibration runs at tp 2 to 32 with sequence parallelism (-6
# to +1, with 1 -9 to -6 %) and at dp 16 to 256 (-14 to +4 %, with 1 -28 to -5, with 0 -5 to +18 %)
# closest together (benchmarks.published.calibration).
# Flash attention's RotaryEmbedding (2.5.0, layers/rotary.py) rotates queries in place, and so keeps
# the whole tensor that queries, keys and values were laid out in. torch 2.1 (the conda environment
# of run_multinode.sh) records memory on the streams that collectives run on.
NANOTRON = System(
    name="nanotron", parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12, sync_bytes=4,
    gradient_sync="ddp", accumulate_bytes=4, attention="flash", pointwise="eager", dropout=False,
    sequence_parallel=True, tp_overlap="nanotron", logits_bytes=8, saved_logits_bytes=4,
    cost_partition=True, first_stage_memory=True, bucket_bytes=2, half_gradients=True,
    clip_bytes=12, gather_copies=True, layer_dispatch_s=(1.0e-3, 1.1e-3),
    tp_dispatch_s=(0.38e-3, 0.44e-3), hidden=0.4, reduces_all=True,
    rotates_in_place=True, frees_late=True, bucket=25 * 2**20,
)  # fmt: skip
# bench_cluster, half a year before (bench_cluster/template/base_config.py;
# tp_linear_async_communication false): gathered inputs are kept, as torch's linears keep theirs.
# Nothing is seen to come back late there; which torch it ran is not known.
NANOTRON_PLAIN = replace(
    NANOTRON, keeps_gathered=True, plain_linears=True, tp_overlap="none", tp_dispatch_s=(0.0, 0.0),
    frees_late=False,
)  # fmt: skip

# torchtitan with FSDP2: fp32 sharded parameters, gradients and moments; bf16 all-gather, fp32
# reduce-scatter (its docs/fsdp.md and the table's notes). The loss casts logits to fp32
# (pred.float() in cross_entropy). Bytes per logit that the allocator has then reserved: the logits
# (2), freed before the backward in a block too small for the rest; log-softmax, its gradient and
# the gradient of the fp32 logits (3 x 4). Since 2.1 torch's checkpoints without reentry stop where
# backward has what it reads (torch.utils.checkpoint, set_checkpoint_early_stop).
TORCHTITAN = System(
    name="torchtitan", parameter_bytes=4, gradient_bytes=4, optimizer_bytes=8, sync_bytes=4,
    gradient_sync="fsdp", accumulate_bytes=0, attention="flash", pointwise="eager",
    dropout=False, sequence_parallel=True, tp_overlap="none", logits_bytes=14,
    saved_logits_bytes=4, separate_qkv=True, composite_norm=True, stops_early=True,
)  # fmt: skip

# LLM Foundry (Composer with FSDP of torch 1.13 and 2.1; benchmarking/submit_benchmarks.py and
# MPT's modeling_mpt.py): one product for queries, keys and values, layer norm as one kernel in half
# precision, flash-attn's loss, which reads the logits as they are, and Composer's own AdamW, one
# operator after the other (as torch 1.13's below). Its tables name the mixed precision: DEFAULT
# reduces in fp32, PURE in half precision. attn_impl is triton by default until 2024: version 2 is
# 1.3 to 2.5 times faster than flash attention in Triton (Dao 2023, section 1), the middle.
FOUNDRY = replace(
    TORCHTITAN, name="LLM Foundry", separate_qkv=False, composite_norm=False, logits_bytes=4,
    saved_logits_bytes=2, loss_bytes=(2, 4), update_bytes=60, attention_slowdown=1.9,
)  # fmt: skip
# Its older tables (bf16 throughout), of torch 1.13.
FOUNDRY_1 = replace(FOUNDRY, sync_bytes=2, stops_early=False)

# IBM's fms-fsdp (fms_fsdp/policies/mixed_precision.py): FSDP that reduces in half precision.
FMS = replace(TORCHTITAN, name="fms-fsdp", sync_bytes=2)

# Alpa: XLA on V100, fp16 with fp32 master weights; unfused attention, pointwise work fused by the
# compiler; gradients reduced after the last micro-batch in fp16 (gradient accumulation in the
# compiled program); stages of equal numbers of layers.
ALPA = System(
    name="Alpa", parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12, sync_bytes=2,
    gradient_sync="end", accumulate_bytes=0, attention="unfused", pointwise="compiled",
    dropout=False, sequence_parallel=False, tp_overlap="none", logits_bytes=10,
    saved_logits_bytes=4, sends_parts=True, reduces_at_once=True,
)  # fmt: skip
# Its models with experts (alpa/model/moe.py, as in GShard, with room for twice the mean) train with
# Adafactor (benchmark/alpa/benchmark_2d_one_case_moe.py): of two moments only sums of rows and
# columns, so that master weights remain. Tokens are in groups of 1024 (exp_intra_ablation.py; 2048
# in its suites, whose rows give no shape).
ALPA_EXPERTS = replace(ALPA, name="Alpa, experts", optimizer_bytes=4, one_hot_experts=1024,
                       relays_experts=True)  # fmt: skip

# InternEvo, configs/7B_sft.py: bf16 parameters and gradients, hybrid ZeRO-1 with reduction of
# gradient buckets beside the backward (hybrid_zero_optimizer overlap_sync_grad=True) and broadcast
# of updated parameters (overlap_sync_param=False there). Flash attention 1.0.5 (doc/install.md):
# version 2 is about twice as fast (Dao 2023, abstract). The ZeRO optimizer (hybrid_zero_optim.py):
# hooks reduce with reduce_rank None, an all-reduce over all replicas whatever the ZeRO group is;
# buckets are flattened and copied back (4 + 4 bytes); whole parameters are dealt to ranks, and each
# rank broadcasts those it updated. Its step flattens gradients in half precision (2; FSDP's
# adapter, fsdp_optimizer.py, does not) and casts them to fp32 (4); torch's Adam of that time makes
# two temporaries, the root and the denominator (4 + 4; one operator after the other in 1.13, all
# parameters at once in 2.0). ZeRO's are single tensors of several GB. That Adam moves 88 bytes per
# parameter (8 decay, 8 + 12 and 8 + 12 moments, 8 + 8 + 8 denominator, 16 update) where a fused one
# moves 28. Logits are cast to fp32 (6) and flash-attn's loss reads them once (4); every
# micro-batch's logits pass the metric as well (model/metrics.py, AccPerplex): the loss again (4), a
# clone (8), maximum twice and its place (12), subtract (8), exponential (8) and sum (4). Logits,
# clone, difference and exponential in fp32 are there at the same time (4 x 4).
INTERNEVO = System(
    name="InternEvo", parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12, sync_bytes=2,
    gradient_sync="ddp", accumulate_bytes=0, attention="flash", pointwise="fused", dropout=False,
    sequence_parallel=False, tp_overlap="backward", logits_bytes=16, saved_logits_bytes=4,
    attention_slowdown=2.0, step_bytes=12, flat_bytes=2, step_apart=True, broadcasts=True,
    reduces_all=True, bucket_copy_bytes=8, update_bytes=60, whole_parameters=True,
    loss_bytes=(54, 14), bucket=512 * 2**20,
)  # fmt: skip

# DeepSpeed and Megatron-DeepSpeed: as Megatron, gradients in half precision on the wire.
DEEPSPEED = System(
    name="DeepSpeed", parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12, sync_bytes=2,
    gradient_sync="ddp", accumulate_bytes=2, attention="unfused", pointwise="fused", dropout=True,
    sequence_parallel=False, tp_overlap="none", logits_bytes=10, saved_logits_bytes=4,
    vocab_multiple=128,
)  # fmt: skip

# BLOOM's Megatron-DeepSpeed of February 2022, a fork of Megatron-LM 2.4 (July 2021): no
# asynchronous all-reduce, gradients reduced after the last micro-batch. Its script sets
# CUDA_LAUNCH_BLOCKING, without which jobs of 320 GPUs and more hung. DeepSpeed's pipeline
# (runtime/pipe/engine.py) sends each tensor-parallel rank's part and gathers, by p2p calls that its
# stream waits for; autograd adds gradients in half precision (reads two, writes one). By the
# source's own comparison on 80 GPUs (91.04 against 97.20 TFLOP/s, rows that are not in the table)
# blocking costs 3.5 ms for each layer and micro-batch, of which the operators' own dispatch is 1.0.
# Its optimizer (zero/stage_1_and_2.py) flattens a rank's gradients and casts them (2 + 4 bytes),
# takes their norms in double precision, and reduces them in buckets of 5e8.
BLOOM = replace(
    MEGATRON_2021, name="Megatron-DeepSpeed 2022", gradient_bytes=2, sync_bytes=2,
    accumulate_bytes=6, schedule="one_f_one_b", blocks_launches=True, sends_wait=True,
    full_stages=True, layer_dispatch_s=(0.8e-3, 0.9e-3),
    step_bytes=6, step_table_bytes=8, step_buffer_bytes=10**9, step_apart=True,
)  # fmt: skip
# Its BF16_Optimizer keeps and sums gradients in fp32, on all ranks (README of tr11-176B-ml); those
# of a backward are there in half precision besides, and are cast one tensor after the other.
BLOOM_BF16 = replace(
    BLOOM, gradient_bytes=6, sync_bytes=4, accumulate_bytes=10,
    step_bytes=0, step_table_bytes=4, step_buffer_bytes=2 * 10**9,
)  # fmt: skip

# Megatron-Core since 2023: distributed optimizer, overlapped gradient reduction, flash attention.
MEGATRON_CORE = System(
    name="Megatron-Core", parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12, sync_bytes=4,
    gradient_sync="ddp", accumulate_bytes=2, attention="flash", pointwise="fused", dropout=False,
    sequence_parallel=True, tp_overlap="backward", logits_bytes=10, saved_logits_bytes=4,
    vocab_multiple=128, schedule="interleaved", current_libraries=True,
)  # fmt: skip
# NeMo's recipes: Transformer Engine's float8 and cuDNN's attention, which on Hopper takes 1/1.5 to
# 1/1.75 of the time of version 2 (FlashAttention-3, Shah et al. 2024, figures 5 and 6: as fast as
# it). Its loss is fused: reads logits twice, writes their gradient in place. Collectives of tensor
# parallelism run beside both of backward's products, and forward and before the row-parallel input
# gradient in chunks where a recipe's table of userbuffers says so.
NEMO = replace(
    MEGATRON_CORE, name="NeMo", casts_once=True, attention_slowdown=0.62, loss_bytes=(6, 4),
    tp_overlap="userbuffers", logits_bytes=4, saved_logits_bytes=2,
)  # fmt: skip

# In this order: the first whose words a row or its table holds.
_WORDS: tuple[tuple[tuple[str, ...], System], ...] = (
    (("nanotron",), NANOTRON),
    (("torchtitan", "fsdp2"), TORCHTITAN),
    (("internevo",), INTERNEVO),
    (("llm foundry", "llm-foundry"), FOUNDRY),
    (("fms-fsdp", "fms_fsdp"), FMS),
    (("sc21",), MEGATRON_2021),
    (("korthikanti", "selective recompute"), MEGATRON_2022),
    (("nemo", "transformer engine", "megatron bridge"), NEMO),
    (("megatron-core",), MEGATRON_CORE),
    (("bigscience", "bloom"), BLOOM),
    (("megatron",), MEGATRON_2022),
    (("alpa",), ALPA),
    (("deepspeed",), DEEPSPEED),
    (("fsdp",), TORCHTITAN),
)


# The launch script for several nodes of that time (examples/mamba/run_multinode.sh, committed three
# weeks after scripts/scaling_benchmarks.py, whose --base_script it is) sets
# TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then compares each collective's fingerprint over Gloo before
# it starts it (ProcessGroupWrapper.cpp): a monitored barrier, in which rank 0 answers every other
# rank, and two gathers round a ring, about 4 messages one after the other per further rank. Two
# processes of a small machine took 0.43 ms for it while others worked, and four messages at their
# best 0.15 ms: the middle.
_DEBUG_CHECK_S = 0.3e-3


def _of_time(system: System, row: Row) -> System:
    """As the row's model and date have it. nanotron checks collectives over nodes since the
    sweep's rerun."""
    if system is TORCHTITAN:
        return replace(system, logits_bytes=_titan_logits(row))
    if system is FOUNDRY and "throughout" in row.precision:
        return FOUNDRY_1
    if system is BLOOM and "fp32 gradients" in row.precision:
        return BLOOM_BF16
    if system is ALPA and row.shape.experts:
        return ALPA_EXPERTS
    if system is not NANOTRON:
        return system
    if "bench_cluster" in row.system.lower():
        return NANOTRON_PLAIN
    known = checked(row.bandwidths)
    # Jobs that ran out of memory have no test: those of the rerun over several nodes.
    guess = row.revised and row.gpus > row.gpus_per_node
    checks = guess if known is None else known
    return replace(system, check_s=_DEBUG_CHECK_S) if checks else system


def _titan_logits(row: Row) -> int:
    """Per logit. Since 2025 the loss is compiled with the model: logits and their gradient, both in
    half precision (torchtitan pull request 1033; Dao-AILab/quack issue 48 says how much torch's
    compiled loss takes). Split logits, not compiled (torch.distributed.tensor.parallel.loss): the
    gradient adds two fp32 temporaries, the exponential and a sum, less the one it ends in.
    """
    if row.compiled and not re.search(r"\b2024\b", row.system.split(row.table)[0]):
        return 4
    return 18 if row.parallel.tp > 1 else 14


def system_of(row: Row) -> System:
    """The stack that a row ran on: its own words first, then those of its table."""
    text = row.system.lower()
    own, table = text.split(row.table.lower(), 1) if row.table.lower() in text else ("", text)
    for words in (own, row.table.lower(), table):
        for keys, system in _WORDS:
            if any(key in words for key in keys):
                return _of_time(system, row)
    known = ", ".join(sorted({system.name for _, system in _WORDS}))
    raise RowError(f"no stack is named; known are {known}")
