"""A torchtitan configuration: a function that puts the plan into a recipe's `Trainer.Config`."""

from collections.abc import Iterator

from meshwright.forms.updates import names_elsewhere
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision
from meshwright.ir.text.plain_text import docstring, quoted
from meshwright.tools.export.export import Exported, Request, title
from meshwright.tools.export.export_precision import lost_precision
from meshwright.tools.export.export_tensor import tensor_splits

_SCHEDULES = {
    "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble", "dual_pipe_v": "DualPipeV",
}  # fmt: skip
_REMAT = {"full": "FullActivationRematConfig()", "none": "None"}
_LAYERS = (
    "",
    "",
    "def _layers(start: int, stop: int) -> list[str]:",
    '    return [f"layers.{i}" for i in range(start, stop)]',
)
_RESHARD = {1: "never", 2: "never", 3: "always"}


def export(request: Request) -> Exported:
    plan, shape = request.plan, request.shape
    full = shape.recompute == "full"
    imports = ["from torchtitan.config.parallelism import ParallelismConfig"]
    if full:
        activation = "torchtitan.distributed.activation_checkpoint"
        imports.append(f"from {activation} import FullActivationRematConfig")
    lines = [
        docstring(
            f"{title(plan)}.", "", "Names are those of torchtitan's main branch in November 2026."
        ),
        "",
        *imports,
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def with_plan(config: Trainer.Config) -> Trainer.Config:",
        '    """A recipe\'s configuration, laid out as the plan says."""',
        "    config.parallelism = ParallelismConfig(",
        *(f"        {name}={value}," for name, value in _parallelism(request)),
        "    )",
        *(f"    config.training.{name} = {value}" for name, value in _training(request)),
        f"    config.activation_checkpoint = {_REMAT['full' if full else 'none']}",
        "    return config",
        *(_LAYERS if shape.pp > 1 and shape.layers else ()),
    ]
    return Exported("\n".join(lines) + "\n", (*shape.odd, *_missing(request)))


def _parallelism(request: Request) -> Iterator[tuple[str, str]]:
    shape = request.shape
    sharded = shape.zero > 0
    yield "data_parallel_replicate_degree", str(shape.dp_replicate if sharded else shape.dp)
    yield "data_parallel_shard_degree", str(shape.dp_shard if sharded else 1)
    if sharded:
        yield "fsdp_reshard_after_forward", quoted(_RESHARD[shape.zero])
    yield "tensor_parallel_degree", str(shape.tp)
    if shape.tp > 1:
        yield "enable_sequence_parallel", str(shape.sequence_parallel)
    yield "context_parallel_degree", str(shape.cp)
    yield "expert_parallel_degree", str(shape.ep)
    yield "pipeline_parallel_degree", str(shape.pp)
    if shape.pp > 1:
        yield "pipeline_parallel_schedule", quoted(_schedule(request.plan, shape.pp))
        yield "num_pp_microbatches", str(request.plan.num_microbatches)
        if shape.layers:
            yield "pipeline_parallel_module_fqns_per_model_part", _parts(request)


def _schedule(plan: Plan, ranks: int) -> str:
    """Torchtitan's name of the schedule, or of the nearest that runs as many parts on a rank: one
    for a single part each would leave out all but the first."""
    near = "Interleaved1F1B" if len(plan.stages) > ranks else "1F1B"
    return _SCHEDULES.get(plan.schedule.name, near)


def _parts(request: Request) -> str:
    """Names of modules, stage by stage, as torchtitan's decoders call them."""
    parts = [[f"*_layers({start}, {stop})"] for start, stop in request.shape.layers]
    parts[0].insert(0, quoted("tok_embeddings"))
    parts[-1] += [quoted("norm"), quoted("lm_head")]
    lines = [f"            [{', '.join(part)}]," for part in parts]
    return "\n".join(["[", *lines, "        ]"])


def _training(request: Request) -> Iterator[tuple[str, str]]:
    """Batches in tokens, as torchtitan counts them."""
    plan = request.plan
    length = _length(plan)
    yield "max_context_length", str(length)
    yield "num_tokens_per_microbatch_per_dp_rank", str(request.shape.samples * length)
    yield "num_tokens_per_train_step", str(plan.global_batch_size * length)
    yield "max_norm", repr(plan.max_grad_norm or 0.0)
    if precision(plan.precision).products == "float32":
        yield "mixed_precision_param", quoted("float32")


def _length(plan: Plan) -> int:
    shape = plan.model.inputs[0].shape
    return shape[1] if len(shape) > 1 else 1


def _missing(request: Request) -> Iterator[str]:
    plan, shape = request.plan, request.shape
    if shape.zero in (1, 2):
        yield (
            f"ZeRO {shape.zero}: torchtitan shards parameters too; exported is FSDP that gathers "
            "them once per step"
        )
    if shape.pp > 1 and plan.schedule.name not in _SCHEDULES:
        yield (
            f"the schedule {plan.schedule.name!r} by name: torchtitan reads such tables as CSV; "
            f"exported is {_schedule(plan, shape.pp)}"
        )
    if shape.pp > 1 and not shape.layers:
        yield "the split into stages: layers are not all alike"
    if shape.recompute == "some":
        yield "recomputation of some layers only: none is given"
    yield from lost_precision(plan, ("float32", "bfloat16"))
    if plan.optimizer not in names_elsewhere("torchtitan"):
        yield f"optimizer {plan.optimizer!r}: set optim in your recipe"
    yield from tensor_splits(plan)
