"""Which hooks and settings of Lightning a job honours, and why not the others.

Closed by default: a method of LightningModule that is overridden and not listed is refused. Each
argument of Trainer is in a table; a test says which ones a newer Lightning has.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision

_GRADIENTS = "gradients are the job's, in pieces on many ranks, and not those of this module"
_WEIGHTS = "weights are the job's, and this module's are those from before training"
_BATCH = "the job takes to the device what a rank needs of a batch; change batches in the dataset"
REFUSED = {
    "backward": _GRADIENTS,
    "manual_backward": _GRADIENTS,
    "on_before_backward": _GRADIENTS,
    "on_after_backward": _GRADIENTS,
    "on_before_optimizer_step": _GRADIENTS,
    "configure_gradient_clipping": "the job clips by the global norm: Trainer(gradient_clip_val=)",
    "clip_gradients": "the job clips by the global norm: Trainer(gradient_clip_val=)",
    "optimizer_zero_grad": "the job clears gradients itself",
    "predict_step": "a job gives the loss only; predict with what job.export() wrote",
    "on_before_batch_transfer": _BATCH,
    "transfer_batch_to_device": _BATCH,
    "on_after_batch_transfer": _BATCH,
}
"""Method -> why a job cannot honour it."""
_CALLED = frozenset(
    """
    training_step validation_step test_step forward setup teardown prepare_data configure_model
    configure_optimizers configure_callbacks train_dataloader val_dataloader test_dataloader
    predict_dataloader optimizer_step lr_scheduler_step on_before_zero_grad on_save_checkpoint
    on_load_checkpoint log log_dict print example_input_array
    """.split()
)
"""What Lightning calls as always. So it does with all that begins with `on_` and is not refused."""
_CALLBACKS = {
    "StochasticWeightAveraging": _WEIGHTS,
    "WeightAveraging": _WEIGHTS,
    "EMAWeightAveraging": _WEIGHTS,
    "ModelPruning": _WEIGHTS,
    "BaseFinetuning": "a job trains the groups that it was made with",
    "LearningRateFinder": "it sets the module back to weights from before",
    "BatchSizeFinder": "the plan says how large a batch is",
}
_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def check_lightning(module: LightningModule, trainer: Trainer, plan: Plan) -> None:
    """PlanError with all that the module, its callbacks and the trainer ask for in vain."""
    found = [
        *_module(module),
        *(text for callback in trainer.callbacks for text in _callback(callback)),  # type: ignore[attr-defined]
        *(text for why in DEPENDS.values() if (text := why(trainer, plan))),
    ]
    if found:
        raise PlanError("Lightning asks for what a job cannot do:\n  " + "\n  ".join(found))


def _module(module: LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "automatic_optimization is False: the job takes the step, with one optimizer"
    own = set(LightningModule.__mro__)
    for kind in (kind for kind in type(module).__mro__ if kind not in own):
        for name in vars(kind):
            if name in REFUSED:
                yield f"{kind.__name__} overrides {name}: {REFUSED[name]}"
            elif _is_unknown(name):
                yield f"{kind.__name__} overrides {name}: a job's strategy does not call it"


def _is_unknown(name: str) -> bool:
    """Whether Lightning has a method that a job knows nothing of."""
    known = name in _CALLED or name.startswith(("_", "on_"))
    return not known and callable(getattr(LightningModule, name, None))


def _callback(callback: Callback) -> Iterator[str]:
    name = type(callback).__name__
    for kind, why in _CALLBACKS.items():
        wanted = getattr(callbacks, kind, None)
        if wanted is not None and isinstance(callback, wanted):
            yield f"callback {name}: {why}"
            return
    for hook in _OF_GRADIENTS:
        if getattr(type(callback), hook, None) is not getattr(Callback, hook):
            yield f"callback {name} overrides {hook}: {_GRADIENTS}"


def _algorithm(trainer: Trainer, plan: Plan) -> str:
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        return "gradient_clip_algorithm 'value': a job clips by the global norm"
    return ""


def _precision(trainer: Trainer, plan: Plan) -> str:
    asked = str(trainer.precision)
    half = precision(plan.precision).products == "bfloat16"
    if asked == "32-true" or (asked == "bf16-mixed" and half):
        return ""
    return (
        f"precision {asked!r}: the plan computes in {plan.precision}; leave it out, or "
        "search a plan for another one"
    )


def _batch_norm(trainer: Trainer, plan: Plan) -> str:
    if getattr(trainer.strategy, "_layer_sync", None) is None:
        return ""
    return "sync_batchnorm: a job's batch-norm sees the samples of one micro-batch of a rank"


def _devices(trainer: Trainer, plan: Plan) -> str:
    if trainer.num_devices == 1:
        return ""
    return f"devices={trainer.num_devices}: each rank trains with one; start ranks by torchrun"


def _nodes(trainer: Trainer, plan: Plan) -> str:
    known = trainer.num_nodes
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    each = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    there = int(os.environ.get("GROUP_WORLD_SIZE", ranks // each))
    if known in (1, there):
        return ""
    return (
        f"num_nodes={known}: torchrun has started {there}; leave it out, its --nnodes says how many"
    )


def _validation(trainer: Trainer, plan: Plan) -> str:
    interval = getattr(trainer, "_val_check_time_interval", None)
    if interval is None or plan.world_size == 1:
        return ""
    return (
        f"val_check_interval of {interval:g} s: each rank looks at its own clock, and some would "
        "validate while others train; give a number of batches"
    )


def _plugins(trainer: Trainer, plan: Plan) -> str:
    """Lightning keeps what was given beside what it chose itself."""
    chosen: Any = trainer._accelerator_connector
    for name, why in _PLUGINS.items():
        if (given := getattr(chosen, name, None)) is not None:
            return f"plugins {type(given).__name__}: {why}"
    return ""


_PLUGINS = {
    "_precision_plugin_flag": "the plan says in which precision a job computes",
    "_cluster_environment_flag": "torchrun says which rank this is",
}
DEPENDS: Mapping[str, Callable[[Trainer, Plan], str]] = {
    "devices": _devices,
    "gradient_clip_algorithm": _algorithm,
    "num_nodes": _nodes,
    "plugins": _plugins,
    "precision": _precision,
    "sync_batchnorm": _batch_norm,
    "val_check_interval": _validation,
}
"""Argument of Lightning's Trainer -> why its value does not go with a job; nothing if it does."""
WORKS = frozenset(
    """
    accelerator strategy logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps
    max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
    overfit_batches check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
    enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches
    gradient_clip_val deterministic benchmark inference_mode use_distributed_sampler profiler
    detect_anomaly barebones reload_dataloaders_every_n_epochs default_root_dir
    enable_autolog_hparams model_registry
    """.split()
)
"""Arguments that do what they do without a job. Callbacks are looked at one by one; batches for
`predict` are never asked for."""


def limit_of(trainer: Trainer, plan: Plan) -> float | None:
    """The largest norm of gradients; None leaves it to the plan, 0 asks for no clipping."""
    if trainer.gradient_clip_val is None:
        return None
    if trainer.gradient_clip_val > 0:
        return float(trainer.gradient_clip_val)
    return None if plan.max_grad_norm is None else math.inf
