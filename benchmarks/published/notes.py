"""What the page of published runs says beside its figures."""

HEAD = """\
# Published training runs, predicted

`python -m benchmarks.published REPORT_DIR benchmarks/tables -o docs/results/published.md`. Every
number is the product's own, `plan.predicted`: a Hugging Face model of the row's shape is traced,
the row's layout is a plan by hand, and the cluster is a preset. What the row's stack does that a
plan does not say is a file of `ir/styles` (`meshwright search --as NAME`): whose libraries its
kernels are of, what its CPU takes for collectives and layers, which kernels it fuses, how its
gradients agree, what its memory holds. Until 26 November 2026 this page came from a second model in
this folder; that is gone.

No number is fitted to these rows. Constants of styles come from the calibration part of the tables,
from data sheets, from sources of the stacks or from stated assumptions; many of the mechanisms were
found over four days with these rows in view, so for them this page is no blind test.

Rows of this repository's own tables are of two parts, `calibration` and `report`, by a checksum of
model, GPUs and their kind (`benchmarks/published/parts.py`; `--part` runs one of them): what is
changed in view of rows is changed in view of the first. Mechanisms older than 26 November 2026,
evening, had all rows in view.

Errors are relative; above zero means predicted too slow or too large. `in band` is the share of
rows whose step took what the plan says, give or take the error that it states; in brackets, how
many times as wide bands would have to be for four fifths of such runs (split conformal: the
quantile of errors over bands). `rank` is Spearman's correlation of step times.
"""

LOG = """\
## What is not as it ran

- The network is the device's preset, or the row's own words for it; what a job's own network test
  said of its links is not used. nanotron's jobs that compared fingerprints of each collective are
  told by that test (`nanotron-checked`).
- What a stack's memory holds beside a plan (DDP's buckets, flat gradients, gathers, values that are
  freed late, an allocator's reserve) is part of its style; an allocator that is short of memory
  gives back what is only reserved, so that verdicts do not count it. FSDP over context ranks alone
  (one replica) has no place in a plan.
- FSDP in a pipeline neither frees parameters nor reduces gradients between micro-batches: it is
  ZeRO 1 of ours.
- Experts are experts of ours (Hugging Face's Qwen3-MoE, Qwen2-MoE and DeepSeek-V3 models of the
  row's shape), whose ranks have samples of their own, as in these stacks. Where ranks of tensor
  parallelism have other experts, not parts of one, experts lie on `ep` and `tp` together. How often
  a token travels is part of the style (`Style.token_to`), and so is what putting tokens into order,
  gates and bringing tokens back take beside the products (`Style.fused_experts`). Experts that are
  not gated have no place in these models: left out. Of all-to-alls beside another micro-batch's
  work (Megatron's `moe_a2a_overlap`) the same share is hidden in every layout
  (`Style.travel_shown`), and layers that predict a second token ahead (DeepSeek-V3's, in Megatron
  Bridge) are not there. Layers of experts in part of CUDA graphs are those of a style, not of
  `capture`.
- Vocabularies are padded as Megatron pads them, to multiples of 128 times the ranks of tensor
  parallelism; without that a shard of BLOOM's, whose tokenizer has 250,680 words (pull request 30
  of bigscience-workshop/bigscience), has an odd number of rows.
- Compiled blocks are priced as blocks with our fused kernels.
- Selective recompute of layers whose attention is one kernel is ours (`saved=selective`), which
  chooses by bytes and seconds; of attention that is written out its core is made again, and
  torchtitan's per-op recompute goes by its list.
- A pipeline whose middle stage has no layer (nanotron's deep ones) is left out, and so is recompute
  of every second layer.
- Tensor parallelism over nodes and data parallelism over 256 GPUs and more under nanotron are the
  least certain; allocators near the memory limit have no price.
"""
