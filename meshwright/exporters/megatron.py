"""Flags of Megatron-LM's `pretrain_gpt.py`, as a shell array."""

from collections.abc import Iterator

from meshwright.forms.updates import names_elsewhere
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision
from meshwright.tools.export.export import Exported, Request, title_comment
from meshwright.tools.export.export_precision import lost_precision
from meshwright.tools.export.export_tensor import tensor_splits

_SIZES = {
    "hidden-size": "hidden_size", "ffn-hidden-size": "intermediate_size",
    "num-attention-heads": "num_attention_heads",
    "max-position-embeddings": "max_position_embeddings",
}  # fmt: skip
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}


def export(request: Request) -> Exported:
    flags = [*_mesh(request), *_batch(request), *_zero(request), *_training(request.plan),
             *_recompute(request), *_model(request)]  # fmt: skip
    body = "\n".join(f"  {flag}" for flag in flags)
    text = (
        f"{title_comment(request.plan)}\n"
        f'# torchrun ... pretrain_gpt.py "${{MEGATRON_ARGS[@]}}" and your data and tokenizer\n'
        f"MEGATRON_ARGS=(\n{body}\n)\n"
    )
    return Exported(text, (*request.shape.odd, *_missing(request)))


def _mesh(request: Request) -> Iterator[str]:
    shape = request.shape
    yield f"--tensor-model-parallel-size {shape.tp}"
    yield f"--pipeline-model-parallel-size {shape.pp}"
    if shape.pp > 1 and shape.layers:
        yield f'--pipeline-model-parallel-layout "{_layout(request)}"'
    if shape.cp > 1:
        yield f"--context-parallel-size {shape.cp}"
    if shape.ep > 1:
        yield f"--expert-model-parallel-size {shape.ep}"
    if shape.sequence_parallel:
        yield "--sequence-parallel"


def _layout(request: Request) -> str:
    """Stages in order, `E` for the embedding, `t` per layer, `L` for the loss."""
    parts = [f"t*{stop - start}" if stop > start else "" for start, stop in request.shape.layers]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L"
    return "|".join(parts)


def _batch(request: Request) -> Iterator[str]:
    yield f"--micro-batch-size {request.shape.samples}"
    yield f"--global-batch-size {request.plan.global_batch_size}"


def _zero(request: Request) -> Iterator[str]:
    shape = request.shape
    if not shape.zero:
        return
    yield "--use-distributed-optimizer"
    if shape.dp_replicate > 1:
        yield f"--num-distributed-optimizer-instances {shape.dp_replicate}"
    if shape.zero > 1:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {_SHARDED[shape.zero]}"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"
    yield "--overlap-grad-reduce"
    yield "--overlap-param-gather"


def _training(plan: Plan) -> Iterator[str]:
    numbers = precision(plan.precision)
    if numbers.products == "bfloat16":
        yield "--bf16"
    if numbers.products == "float16":
        yield "--fp16"
    if numbers.sums:
        yield "--grad-reduce-in-bf16"
    if name := names_elsewhere("megatron").get(plan.optimizer):
        yield f"--optimizer {name}"
    yield f"--clip-grad {plan.max_grad_norm or 0.0}"


def _recompute(request: Request) -> Iterator[str]:
    layers = request.shape.recomputed_layers
    if request.shape.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif layers:
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {layers}"


def _model(request: Request) -> Iterator[str]:
    shape = request.shape
    if shape.num_layers:
        yield f"--num-layers {shape.num_layers}"
    for flag, name in _SIZES.items():
        if isinstance(value := request.setting(name), int):
            yield f"--{flag} {value}"
    heads, groups = (request.setting(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if groups and groups != heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {groups}"
    inputs = request.plan.model.inputs[0].shape
    if len(inputs) > 1:
        yield f"--seq-length {inputs[1]}"
    if request.setting("tie_word_embeddings") is False:
        yield "--untie-embeddings-and-output-weights"


def _missing(request: Request) -> Iterator[str]:
    plan, shape = request.plan, request.shape
    if not shape.layers:
        yield "layers that are not all alike: Megatron's layout counts layers of one kind"
    if shape.pp > 1 and plan.schedule.name not in ("one_f_one_b", "interleaved"):
        yield f"the schedule {plan.schedule.name!r}: Megatron has 1F1B and its interleaved form"
    yield from lost_precision(plan, ("float32", "bfloat16", "float16"), sums=True)
    known = names_elsewhere("megatron")
    if plan.optimizer not in known:
        names = (f"{own} (called {other})" for own, other in known.items())
        yield f"optimizer {plan.optimizer!r}; Megatron has {' and '.join(names)}"
    if shape.recompute == "some" and not shape.recomputed_layers:
        yield "recomputation of layers that are not the same number of first ones in every stage"
    if shape.zero > 1 and shape.pp > 1:
        yield f"ZeRO {shape.zero} in a pipeline: Megatron-FSDP is for plans without stages"
    if request.config is None:
        yield "sizes of the model (hidden-size and others): give --model"
    elif request.setting("model_type") != "gpt2":
        kind = request.setting("model_type")
        yield f"the kind of layers of {kind!r} (activation, norms, positions): give its own flags"
    yield from tensor_splits(plan)
