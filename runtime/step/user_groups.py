"""The groups of the user's optimizer: what a scheduler or the user changes there, the job does."""

import copy
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import has_stepped
from meshwright.runtime.record.late import LateNumber
from meshwright.runtime.step.planned_updates import members_of

Settings = dict[str, Any]
_HOW = ("params", "fused", "foreach", "capturable", "differentiable")
"""How to compute, which the job decides for itself."""


class UserGroups:
    """The user's optimizer beside the job's, whose groups are in the same order."""

    def __init__(self, user: torch.optim.Optimizer, own: torch.optim.Optimizer) -> None:
        self._user, self._own = user, own
        self._marks: list[tuple[int, LateNumber]] = []
        """Sums over ranks of their marks, as they should be and as they are, that nobody has
        compared."""
        self._params = [[id(p) for p in group["params"]] for group in user.param_groups]
        self._remember()

    def take(self) -> None:
        """Before a step: what has changed in the user's groups since the last is taken over.

        PlanError if the job's were changed too, to something else.
        """
        self._check_members()
        self.check_ranks(all_of_them=False)
        pairs = zip(self._user.param_groups, self._own.param_groups, strict=True)
        for number, (user, own) in enumerate(pairs):
            for key, value in _settings(user).items():
                if _same(value, self._users[number].get(key)):
                    continue
                if not _same(own.get(key), self._owns[number].get(key)) and not _same(
                    own.get(key), value
                ):
                    raise PlanError(
                        f"{key} of parameter group {number} is now {value} in your optimizer and "
                        f"{own.get(key)} in job.optimizer: change it in one of them"
                    )
                own[key] = copy.deepcopy(value)
        self._remember()

    def mark(self) -> int:
        """A number that tells the settings of ranks apart; it travels with the loss."""
        return crc32(repr([_settings(group) for group in self._user.param_groups]).encode())

    def heard(self, wanted: int, found: Tensor) -> None:
        """The sum over ranks of their marks in a step, as it should be and as it is."""
        self._marks.append((wanted, LateNumber(found)))

    def check_ranks(self, *, all_of_them: bool) -> None:
        """PlanError if marks differ; of a step that the device is still at, at the next one, unless
        it is to be waited for."""
        while self._marks and (all_of_them or len(self._marks) > int(self._marks[-1][1].is_late)):
            wanted, found = self._marks.pop(0)
            if wanted != round(float(found)):
                raise PlanError(
                    "the groups of your optimizer differ from rank to rank: every rank has to step "
                    "the scheduler, and to change settings, in the same way"
                )

    def stepped(self) -> None:
        """The job has stepped: so has the user's optimizer, for schedulers that ask."""
        for one in members_of(self._user):
            has_stepped(one)
        has_stepped(self._user)

    def give(self) -> None:
        """The job's groups were restored: the user's get the same settings."""
        for user, own in zip(self._user.param_groups, self._own.param_groups, strict=True):
            user.update(copy.deepcopy(_settings(own)))
        self._remember()

    def _remember(self) -> None:
        self._users, self._owns = (
            [copy.deepcopy(_settings(group)) for group in optimizer.param_groups]
            for optimizer in (self._user, self._own)
        )

    def _check_members(self) -> None:
        now = [[id(p) for p in group["params"]] for group in self._user.param_groups]
        if now == self._params:
            return
        before, after = _counted(self._params), _counted(now)
        raise PlanError(
            f"the groups of your optimizer have changed since compile(): {before} then, {after} "
            "now; a job trains the groups that it was made with: add groups before compile(), with "
            "lr 0 for what is to rest until later"
        )


def _counted(groups: Sequence[Sequence[int]]) -> str:
    return f"{len(groups)} groups of {sum(map(len, groups))} parameters"


def _settings(group: Settings) -> Settings:
    return {key: value for key, value in group.items() if key not in _HOW}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not None and b is not None and bool(torch.as_tensor(a == b).all())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
