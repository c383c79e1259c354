"""Which software stack a row ran on, by its words, and what its models are made of."""

import re
from dataclasses import dataclass, replace

from benchmarks.published.cuts import Cut, by_cost, equal, full
from benchmarks.published.measured import RowError
from benchmarks.published.rows import Row


@dataclass(frozen=True, slots=True)
class Stack:
    """A style of ours, and what a user's model has on that stack."""

    style: str
    flash: bool = True
    """Flash attention; otherwise products, a softmax and what lies between."""
    dropout: float = 0.0
    sums_half: bool = False
    """Gradients are reduced in half precision."""
    cut: Cut = equal
    """How it cuts layers into stages."""
    keeps_gathered: bool = False
    """Between micro-batches of a pipeline FSDP neither frees parameters nor reduces gradients:
    what plans of ours call ZeRO 1."""
    logs_first_stage: bool = False
    """Memory is what the rank of the first stage logged, not the fullest rank's."""


_NANOTRON = Stack("nanotron", cut=by_cost, logs_first_stage=True)
# parallelize_llama.py: fsdp_reshard_after_forward; torch's pipelining/stage.py sums gradients.
_TITAN = Stack("torchtitan", keeps_gathered=True)
_TITAN_COMPILED = replace(_TITAN, style="torchtitan-compiled")
_TITAN_2024 = replace(_TITAN, style="torchtitan-2024")
_ASYNC = {"torchtitan-compiled": "torchtitan-async", "torchtitan-2024": "torchtitan-2024-async"}
"""Styles, and the same with asynchronous tensor parallelism."""
_MEGATRON = Stack("megatron-2022", flash=False, dropout=0.1)
_OLD_MEGATRON = replace(_MEGATRON, style="megatron-2021")
_NEMO = Stack("nemo", sums_half=True)
_FLEX = replace(_NEMO, style="nemo-flex")
_GRAPHS = {"routers": "nemo-flex-routers", "attention and routers": "nemo-flex-graphs"}
"""What a row's CUDA graphs hold, and the style."""
_AUTOMODEL = Stack("automodel", keeps_gathered=True)
# vectorlm/utils/model_utils.py: MixedPrecision(reduce_dtype=torch.bfloat16).
_FSDP = Stack("fsdp", sums_half=True)
_INTERNEVO = Stack("internevo", sums_half=True)  # configs/7B_sft.py: bf16 gradients
_BLOOM = Stack("bloom", flash=False, dropout=0.1, cut=full, sums_half=True)
# In this order: the first whose words a row or its table holds.
_WORDS: tuple[tuple[tuple[str, ...], Stack], ...] = (
    (("nanotron",), _NANOTRON),
    (("automodel",), _AUTOMODEL),
    (("torchtitan", "fsdp2"), _TITAN),
    (("internevo",), _INTERNEVO),
    (("vectorlm",), _FSDP),
    (("llm foundry", "llm-foundry"), Stack("llm-foundry")),
    # fms_fsdp/policies/mixed_precision.py.
    (("fms-fsdp", "fms_fsdp"), Stack("fms-fsdp", sums_half=True)),
    (("sc21",), _OLD_MEGATRON),
    (("korthikanti", "selective recompute"), _MEGATRON),
    # Recipes of NeMo and Megatron Bridge: grad_reduce_in_fp32 = False (llama31_llm_pretrain.py).
    (("deepep", "hybridep"), _FLEX),
    (("nemo", "transformer engine", "megatron bridge"), _NEMO),
    (("megatron-core",), Stack("megatron")),
    (("bigscience", "bloom"), _BLOOM),
    (("megatron",), _MEGATRON),
    (("alpa",), Stack("alpa", flash=False)),
    (("fsdp",), _TITAN),
)
_CHECKED_GB_S = 440.0
"""All-reduces inside a node, by the job's own start-up test. Jobs of nanotron's sweep come in two
kinds, of 422 to 430 and of 454 to 462 GB/s: torch compares fingerprints of collectives before it
starts them, or does not."""


def stack_of(row: Row) -> Stack:
    """The stack that a row ran on: its own words first, then its table's name and framework, and
    what else the table says; RowError where none is named."""
    text = row.system.lower()
    own, table = text.split(row.table.lower(), 1) if row.table.lower() in text else ("", text)
    for words in (own, row.table.lower(), row.framework.lower(), table):
        for keys, stack in _WORDS:
            if any(key in words for key in keys):
                return _as_launched(stack, row)
    raise RowError("no stack is named that a style is known of")


def _as_launched(stack: Stack, row: Row) -> Stack:
    # torchtitan's docs/float8.md names torch.compile as required.
    if stack is _TITAN and (row.compiled or "float8" in row.precision.lower()):
        own = row.system.split(row.table)[0]
        early = re.search(r"\b2024\b", own) or not row.compiled or _is_torchao_of_spring(row)
        found = _TITAN_2024 if early else _TITAN_COMPILED
        return replace(found, style=_ASYNC[found.style]) if row.parallel.async_tp else found
    # Its gpt-oss has `attn: flex` (examples/llm_benchmark/gpt_oss).
    if stack is _AUTOMODEL and row.shape.window:
        return replace(stack, style="automodel-flex")
    if stack is _BLOOM and "asynchronous" in row.system.split(row.table)[0]:
        return replace(stack, style="bloom-async")
    if stack is _BLOOM and "fp32 gradients" in row.precision:
        return replace(stack, style="bloom-bf16", sums_half=False)
    if stack is _INTERNEVO and row.parallel.zero == 3:
        return replace(stack, style="internevo-fsdp")
    if stack is _MEGATRON and row.parallel.sp:
        return replace(stack, style="megatron-2022-sequence")
    if stack in (_NEMO, _FLEX) and row.beside:
        return replace(stack, style=f"{stack.style}-beside")
    if stack is _FLEX and row.graphs:
        return replace(stack, style=_GRAPHS[row.graphs])
    if stack is _NEMO and row.shape.latent and "25.05" in row.system.split(row.table)[0]:
        return replace(stack, style="nemo-latent-2025", flash=_trains_latent(row.gpu))
    if stack is _NEMO and row.padded:
        return replace(stack, style="nemo-padded")
    if stack is _NEMO and _is_nemo_of_2024(row):
        return replace(stack, style="nemo-2024")
    if stack is not _NANOTRON:
        return stack
    if "bench_cluster" in row.system.lower():
        return replace(stack, style="nanotron-2024")
    if row.early:
        return replace(stack, style="nanotron-early")
    # Jobs that ran out of memory have no test: those of the rerun over several nodes check.
    found = row.bandwidths.get("ar_intra")
    checks = found < _CHECKED_GB_S if found else row.revised and row.gpus > row.gpus_per_node
    return replace(stack, style="nanotron-checked") if checks else stack


def _is_nemo_of_2024(row: Row) -> bool:
    """Whether cuDNN's attention was off: in launchers up to 24.07 (on since 04b8d098), but for
    GPT-3 175B."""
    own = row.system.split(row.table)[0]
    return bool(re.search(r"NeMo 24\.0[1-7]\b", own)) and "GPT3-175B" not in row.label


def _is_torchao_of_spring(row: Row) -> bool:
    """Whether a row is of torchao's table of H100: by its README that had torchtitan 0.0.2 and a
    torch 2.7.0a0, older than the compiled loss of April 2025; its table of MI300X is of August."""
    return "torchao float8" in row.system.lower() and "h100" in row.gpu.lower()


def _trains_latent(gpu: str) -> bool:
    """Whether cuDNN had a kernel of attention that trains heads of 192 and 128 values in NeMo's
    container 25.04.01: on Blackwell since 9.11 only (TransformerEngine, fused_attn.cpp, "d_qk =
    192, d_v = 128 + Blackwell + bprop"). The recipes make attention's core again there alone."""
    return not gpu.startswith(("B200", "GB200"))
