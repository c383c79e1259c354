"""A Trainer saves and stops when its job's `Saver` says so."""

from typing import Any

from transformers import TrainerCallback

from meshwright.runtime.job.job import Job
from meshwright.runtime.job.saver import Saver


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
