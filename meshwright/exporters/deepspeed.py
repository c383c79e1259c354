"""A DeepSpeed configuration, for `deepspeed --deepspeed_config`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.forms.updates import names_elsewhere
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision
from meshwright.tools.export.export import Exported, Request
from meshwright.tools.export.export_precision import lost_precision
from meshwright.tools.export.export_tensor import tensor_splits


def export(request: Request) -> Exported:
    plan, shape = request.plan, request.shape
    content: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": shape.samples,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": shape.zero, "overlap_comm": True},
        "gradient_clipping": plan.max_grad_norm or 0.0,
    }
    if shape.zero == 3 and shape.dp_replicate > 1:
        content["zero_optimization"]["zero_hpz_partition_size"] = shape.dp_shard
    numbers = precision(plan.precision)
    if numbers.products == "bfloat16":
        content["bf16"] = {"enabled": True}
        if not numbers.sums:  # else they are summed as they are made
            content["data_types"] = {"grad_accum_dtype": "fp32"}
            content["communication_data_type"] = "fp32"
    if numbers.products == "float16":
        content["fp16"] = {"enabled": True}
    if name := _optimizers().get(plan.optimizer):
        content["optimizer"] = {"type": name, "params": {}}
    if shape.tp > 1:
        content["tensor_parallel"] = {"autotp_size": shape.tp}
    return Exported(json.dumps(content, indent=2) + "\n", (*shape.odd, *_missing(plan, request)))


def _missing(plan: Plan, request: Request) -> Iterator[str]:
    shape = request.shape
    if shape.pp > 1:
        yield (
            f"a pipeline of {shape.pp} ranks: build a PipelineModule with num_stages={shape.pp} "
            "in your script"
        )
    if shape.cp > 1:
        yield f"context parallelism of {shape.cp}: DeepSpeed's Ulysses is set up in your script"
    if shape.ep > 1:
        yield f"expert parallelism of {shape.ep}: give ep_size to deepspeed.moe.layer.MoE"
    if shape.recompute != "none":
        yield "recomputation: call deepspeed.checkpointing in your model"
    if shape.zero in (1, 2) and shape.dp_replicate > 1:
        yield (
            f"ZeRO {shape.zero} inside groups of {shape.dp_shard}: DeepSpeed shards over all "
            f"{shape.dp} replicas"
        )
    yield from lost_precision(plan, ("float32", "bfloat16", "float16"), sums=True)
    if plan.optimizer not in _optimizers():
        yield f"optimizer {plan.optimizer!r}: pass it to deepspeed.initialize"
    yield from tensor_splits(plan)


def _optimizers() -> Mapping[str, str]:
    return names_elsewhere("deepspeed")
