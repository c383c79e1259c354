"""Keeps the user's module from being taken for the trained model.

A job trains tensors of its own; the module keeps its weights as they were. From the first step on
its state dict, its forward and pickling it are errors, until `Job.sync_to` has brought the weights.
"""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import is_fake

_GUARD = "_meshwright_stale"


class Guard:
    """Of one module and one job. Copies of a guarded module are guarded by the same."""

    def __init__(self, model: nn.Module) -> None:
        before = vars(model).get(_GUARD)
        self._handles: list[RemovableHandle] = []
        self._model = model
        self._versions = _versions(model)
        if isinstance(before, Guard):
            before.release()

    def started(self) -> None:
        """Before a step: the job's weights go away from the module's. PlanError if the user has
        changed those since the job took them."""
        if self._handles:
            return
        for name, version in _versions(self._model).items():
            if version != self._versions.get(name, version):
                raise PlanError(
                    f"{name!r} of the module was changed after compile(), which has taken its "
                    "values already: change the module before compile(), or job.load() a checkpoint"
                )
        for module in self._model.modules():
            hooked: Any = module
            self._handles += [
                hooked.register_state_dict_pre_hook(self._saved),
                hooked.register_forward_pre_hook(self._called),
                hooked.register_load_state_dict_post_hook(self._loaded),
            ]
        vars(self._model)[_GUARD] = self

    def release(self) -> None:
        """The module has the job's weights, or new ones of the user's."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        vars(self._model).pop(_GUARD, None)
        self._versions = _versions(self._model)

    @property
    def is_stale(self) -> bool:
        """Whether the job has trained and the module does not know."""
        return bool(self._handles)

    def _saved(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not _is_traced(module):
            self._refuse("its state dict is")

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if not _is_traced(module, inputs):
            self._refuse("its forward computes with")

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        if module is self._model:
            self.release()

    def _refuse(self, what: str) -> None:
        if self._handles:
            raise PlanError(
                f"the module still has the weights from before training, and {what} those: call "
                "job.sync_to() on every rank to bring it the trained ones (job.close(sync=True) at "
                "the end), or job.export(folder) to write them"
            )

    def __deepcopy__(self, memo: Any) -> "Guard":
        return self

    def __reduce__(self) -> Any:
        self._refuse("a pickle of it has")
        return Guard, (nn.Identity(),)


def _versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was changed in place."""
    return {name: p._version for name, p in model.named_parameters()}


def _is_traced(module: nn.Module, inputs: Any = ()) -> bool:
    """Whether only shapes are looked at, which are as they were."""
    return any(is_fake(x) for x in (*inputs, *module.parameters()))


def check_fresh(model: nn.Module) -> None:
    """PlanError if a job has trained the module and it does not have the weights."""
    guard = vars(model).get(_GUARD)
    if isinstance(guard, Guard) and guard.is_stale:
        raise PlanError(
            "another job has trained this module, which still has the weights from before: call "
            "sync_to() of that job, or close it with close(sync=True), and train on; or make the "
            "module anew to start again"
        )


def forget(model: nn.Module) -> None:
    """The module is to keep the weights from before training."""
    guard = vars(model).get(_GUARD)
    if isinstance(guard, Guard):
        guard.release()
