"""Which arguments and overrides of `transformers.Trainer` a job honours, and why not the others.

Closed by default: an argument that is in no table here, or a method that no table names, is refused
when it is set or overridden, so that a newer transformers cannot have something that is ignored.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import Trainer, TrainingArguments

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision

WORKS = frozenset(
    """
    output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
    warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon optim_args
    gradient_accumulation_steps average_tokens_across_devices max_grad_norm tf32 use_cache use_cpu
    torch_empty_cache_steps logging_dir logging_strategy logging_steps logging_first_step
    log_on_each_node logging_nan_inf_filter log_level log_level_replica disable_tqdm
    include_num_input_tokens_seen report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps prediction_loss_only save_only_model
    save_strategy save_steps save_total_limit metric_for_best_model greater_is_better
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed
    data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names length_column_name skip_memory_metrics
    do_train do_eval do_predict resume_from_checkpoint local_rank ddp_timeout ddp_backend
    save_safetensors
    hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    optim_target_modules liger_kernel_config activation_checkpointing_kwargs
    gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode fsdp_config
    """.split()
)
"""As transformers has them. The last lines are read only beside an argument that is refused."""

_LOSS = (
    "the plan is for the loss that the model itself returns; make it part of the model's forward, "
    "and a plan for that model"
)
_PLAN = "a plan says how parameters are split and where stages are"
_LOGITS = "a job gives the loss only, no logits; evaluate on what `trainer.save_model()` wrote"
REFUSED: Mapping[str, str] = {
    "label_smoothing_factor": _LOSS,
    "neftune_noise_alpha": "its hook adds noise to embeddings of a module that a job does not run",
    "fp16_full_eval": "evaluation computes in the plan's precision",
    "bf16_full_eval": "evaluation computes in the plan's precision",
    "activation_checkpointing": "the plan says what is recomputed: search with recompute=full",
    "gradient_checkpointing": "the plan says what is recomputed: search with recompute=full",
    "torch_compile": "the plan says what is compiled: search with compile=true",
    "use_liger_kernel": "the plan says which kernels are fused: search with kernels='auto'",
    "auto_find_batch_size": "the plan says how large a batch is",
    "include_for_metrics": _LOGITS,
    "batch_eval_metrics": _LOGITS,
    "save_on_each_node": "a job writes once, to a folder that all ranks see",
    "enable_jit_checkpoint": "ranks that are told to stop may be at different steps",
    "push_to_hub": "upload the folder that `trainer.save_model()` writes",
    "parallelism_config": _PLAN,
    "fsdp": _PLAN,
    "deepspeed": _PLAN,
    "ddp_find_unused_parameters": _PLAN,
    "ddp_bucket_cap_mb": _PLAN,
    "ddp_broadcast_buffers": _PLAN,
    "ddp_static_graph": _PLAN,
    "debug": "it watches modules that a job does not run",
}
"""Argument -> why a job cannot, and what can."""

_OPTIMIZERS = {
    "lomo": "it steps within the backward, which is the job's",
    "adalomo": "it steps within the backward, which is the job's",
    "layerwise": "it steps within the backward, which is the job's",
    "schedule_free": "it has other weights to train than to evaluate, which a job does not know",
}
"""Part of an optimizer's name -> why no job can; of the others compile() sees whether it can."""
_SAMPLING = ("random", "sequential")


def _optim(args: TrainingArguments, plan: Plan) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    return next((why for part, why in _OPTIMIZERS.items() if part in name), "")


def _bf16(args: TrainingArguments, plan: Plan) -> str:
    if precision(plan.precision).products == "bfloat16":
        return ""
    return f"the plan computes in {plan.precision}; search one with precision='bf16'"


def _fp16(args: TrainingArguments, plan: Plan) -> str:
    if precision(plan.precision).products == "float16":
        return ""
    return f"the plan computes in {plan.precision}; search one with precision='fp16'"


def _train_batch(args: TrainingArguments, plan: Plan) -> str:
    return _batch(args.per_device_train_batch_size, args, plan)


def _eval_batch(args: TrainingArguments, plan: Plan) -> str:
    return _batch(args.per_device_eval_batch_size, args, plan)


def _batch(size: int, args: TrainingArguments, plan: Plan) -> str:
    ranks = max(1, args.world_size)
    if size * ranks == plan.global_batch_size:
        return ""
    return (
        f"with {ranks} ranks it makes {size * ranks} samples, the plan's global batch is "
        f"{plan.global_batch_size}: leave it out, the plan decides"
    )


def _sampling(args: TrainingArguments, plan: Plan) -> str:
    if args.train_sampling_strategy in _SAMPLING:
        return ""
    return f"a job's batches are {' or '.join(_SAMPLING)}"


def _best(args: TrainingArguments, plan: Plan) -> str:
    if not args.save_only_model:
        return ""
    return "the best weights come from the job's checkpoint; leave save_only_model out"


def _accelerator(args: TrainingArguments, plan: Plan) -> str:
    config: Any = args.accelerator_config  # transformers makes it of a dict, or of nothing
    given, plain = config.to_dict(), type(config)().to_dict()
    odd = {name: value for name, value in given.items() if value != plain.get(name)}
    if set(odd) <= {"non_blocking"}:
        return ""
    return f"{', '.join(odd)}: every rank reads the whole batch, and the job cuts it"


DEPENDS: Mapping[str, Callable[[TrainingArguments, Plan], str]] = {
    "optim": _optim,
    "bf16": _bf16,
    "fp16": _fp16,
    "per_device_train_batch_size": _train_batch,
    "per_device_eval_batch_size": _eval_batch,
    "train_sampling_strategy": _sampling,
    "load_best_model_at_end": _best,
    "accelerator_config": _accelerator,
}
"""Argument -> why its value does not go with the plan; nothing if it does."""

PARTS: Mapping[str, str] = {
    "model_init": "pass the model itself, which the plan is for",
    "compute_loss_func": _LOSS,
    "compute_metrics": _LOGITS,
    "preprocess_logits_for_metrics": _LOGITS,
}
"""What `Trainer(...)` takes beside its arguments, and a job cannot honour."""

_CALLED = frozenset(
    """
    __init__ __doc__ __module__ __qualname__ __annotations__ __firstlineno__ __static_attributes__
    __parameters__ __orig_bases__ _tag_names _name
    train evaluate log log_metrics save_metrics save_state metrics_format store_flos
    floating_point_ops num_examples get_num_trainable_parameters get_learning_rates
    get_optimizer_group get_decay_parameter_names get_optimizer_cls_and_kwargs create_optimizer
    create_scheduler create_optimizer_and_scheduler get_train_dataloader get_eval_dataloader
    get_total_train_batch_size add_callback pop_callback remove_callback is_local_process_zero
    is_world_process_zero save_model create_model_card tokenizer _get_learning_rate
    _set_signature_columns_if_needed _remove_unused_columns _get_collator_with_removed_columns
    _maybe_log_save_evaluate _save_checkpoint _determine_best_metric
    """.split()
)
"""What a subclass may override: a job's Trainer calls it as transformers does."""
_METHODS: Mapping[str, str] = {
    "compute_loss": _LOSS,
    "training_step": "the job takes the step",
    "prediction_step": _LOGITS,
    "predict": _LOGITS,
    "evaluation_loop": _LOGITS,
    "hyperparameter_search": "each trial needs a plan and a job of its own",
}


def check_arguments(args: TrainingArguments, plan: Plan) -> None:
    """PlanError with every argument that is set and would be ignored."""
    wrong = [f"{name}: {why}" for name, why in _wrong(args, plan)]
    if wrong:
        raise PlanError("TrainingArguments that a job cannot honour:\n  " + "\n  ".join(wrong))


def _wrong(args: TrainingArguments, plan: Plan) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name in WORKS or _is_default(field, value):
            continue
        if field.name in DEPENDS:
            if why := DEPENDS[field.name](args, plan):
                yield field.name, why
        else:
            unknown = f"meshwright does not know what {value!r} asks for; leave it at its default"
            yield field.name, REFUSED.get(field.name, unknown)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    if default is dataclasses.MISSING:
        made = field.default_factory
        default = None if made is dataclasses.MISSING else made()
    return bool(value == default) or (not value and not default)


def check_overrides(trainer: Trainer, own: type[Trainer]) -> None:
    """PlanError if a class between `own` and the trainer's, or the trainer itself, has a method in
    the place of one of transformers that a job does not call."""
    ours = set(own.__mro__)
    for kind in type(trainer).__mro__:
        if kind not in ours:
            _check_names(kind.__name__, vars(kind))
    _check_names("the trainer", {k: v for k, v in vars(trainer).items() if callable(v)})


def _check_names(owner: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name in _CALLED or not callable(getattr(Trainer, name, None)):
            continue
        why = _METHODS.get(name, "a job's Trainer does not call it, or not as transformers does")
        raise PlanError(f"{owner} overrides {name}: {why}")


def check_parts(trainer: Trainer) -> None:
    """PlanError if the trainer was given what a job cannot honour."""
    for name, why in PARTS.items():
        if getattr(trainer, name, None) is not None:
            raise PlanError(f"{name}: {why}")
