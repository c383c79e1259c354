"""A configuration file for `accelerate launch --config_file`."""

from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.ir.precision import precision
from meshwright.running.launch_shape import LaunchShape, launch_shape
from meshwright.tools.export.export import Exported, Request, title_comment
from meshwright.tools.export.export_precision import lost_precision
from meshwright.tools.export.export_tensor import tensor_splits


def export(request: Request) -> Exported:
    launch = launch_shape(request.plan, request.cluster)
    shape = request.shape
    sharded = shape.zero > 0
    several = shape.tp > 1 or shape.cp > 1
    mixed = {"bfloat16": "bf16", "float16": "fp16"}
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(launch, fsdp=sharded or several),
        "num_machines": launch.num_nodes,
        "num_processes": request.plan.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed.get(precision(request.plan.precision).products, "no"),
        "use_cpu": not launch.on_gpu,
    }
    if sharded or several:
        content["fsdp_config"] = _fsdp(request)
        content["parallelism_config"] = _sizes(request, sharded=sharded)
    text = f"{title_comment(request.plan)}\n{yaml.safe_dump(content, sort_keys=False)}"
    return Exported(text, (*launch.missing, *shape.odd, *_missing(request)))


def _kind(launch: LaunchShape, *, fsdp: bool) -> str:
    if fsdp:
        return "FSDP"
    return "MULTI_GPU" if launch.on_gpu else "MULTI_CPU"


def _fsdp(request: Request) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": request.shape.zero == 3,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": request.shape.recompute == "full",
        "fsdp_offload_params": False,
    }


def _sizes(request: Request, *, sharded: bool) -> dict[str, int]:
    shape = request.shape
    return {
        "parallelism_config_dp_replicate_size": shape.dp_replicate if sharded else shape.dp,
        "parallelism_config_dp_shard_size": shape.dp_shard if sharded else 1,
        "parallelism_config_tp_size": shape.tp,
        "parallelism_config_cp_size": shape.cp,
    }


def _missing(request: Request) -> Iterator[str]:
    plan, shape = request.plan, request.shape
    if shape.pp > 1:
        yield f"a pipeline of {shape.pp} ranks: Accelerate's ParallelismConfig has none"
    if shape.ep > 1:
        yield f"expert parallelism of {shape.ep}"
    if shape.zero in (1, 2):
        yield (
            f"ZeRO {shape.zero}: FSDP 2 shards parameters too; exported is FSDP that gathers them "
            "once per step"
        )
    if not shape.zero and shape.dp > 1 and shape.tp > 1:
        yield "replicas without shards beside tensor parallelism: Accelerate refuses DDP with tp"
    yield from lost_precision(plan, ("float32", "bfloat16", "float16"))
    if plan.num_microbatches > 1:
        yield (
            f"{plan.num_microbatches} micro-batches: give gradient_accumulation_steps="
            f"{plan.num_microbatches} and batches of {shape.samples} per process in your script"
        )
    if plan.max_grad_norm is not None:
        yield f"clipping to {plan.max_grad_norm}: call accelerator.clip_grad_norm_ in your script"
    yield from tensor_splits(plan)
