"""A Trainer saves and stops when its job's `Saver` says so."""

import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from meshwright.runtime.job.job import Job
from meshwright.runtime.job.saver import Saver

_NAME = re.compile(r"checkpoint-([0-9]{1,12})")


def newest_whole(folder: str | Path) -> str | None:
    """The newest checkpoint in a Trainer's folder that is whole: its own state it writes last."""
    found = {
        int(name[1]): path
        for path in Path(folder).glob("checkpoint-*")
        if (name := _NAME.fullmatch(path.name)) and (path / TRAINER_STATE_NAME).exists()
    }
    return str(found[max(found)]) if found else None


class SavesInTrainer(TrainerCallback):
    """Asks after each step; the Trainer itself writes its checkpoint."""

    def __init__(self, job: Job, every: str | int | None) -> None:
        self.saver = Saver(job, None, every=every, save=self._note)
        self._due = False

    def _note(self) -> None:
        self._due = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets what the Trainer does next."""
        if self.saver.stepped():
            control.should_training_stop = True
        if self._due:
            control.should_save, self._due = True, False
