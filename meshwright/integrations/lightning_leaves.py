"""A Lightning Trainer whose job is asked to end saves, and leaves with the code that asks for more.

It may also save each so many steps or seconds; a `ModelCheckpoint` beside it does as it says.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from meshwright.integrations.lightning import JobStrategy
from meshwright.ir.comm.by_store import meet
from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.checkpoint import check_keep
from meshwright.runtime.job.saver import Saver

_NAME = re.compile(r"asked-[0-9]{8,18}\.ckpt")


class JobLeaves(Callback):
    """On SIGTERM, or SIGUSR1 ahead of a time limit, all ranks finish a step, the Trainer saves into
    `folder`, and the process leaves by SystemExit with `exit_codes.RETRY`.

    leaves = JobLeaves("checkpoints")
    Trainer(strategy=JobStrategy(plan), callbacks=[leaves]).fit(module, ckpt_path=leaves.newest())
    """

    def __init__(self, folder: str | Path, every: str | int | None = None, keep: int = 1) -> None:
        """`every` is a number of steps, or a time such as `10m`, which passes on the first rank's
        clock; without it, it saves when it is asked to leave. Of what this object has saved, the
        `keep` newest stay."""
        check_keep(keep)
        self.folder, self._every, self._keep = Path(folder), every, keep
        self._saved: list[Path] = []
        self._saver: Saver | None = None
        self._trainer: Trainer | None = None
        self._stack = ExitStack()

    def newest(self) -> Path | None:
        """What the job saved last."""
        found = (path for path in self.folder.glob("*.ckpt") if _NAME.fullmatch(path.name))
        return max(found, default=None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on signals are noted."""
        job = getattr(trainer.strategy, "job", None)
        if not isinstance(trainer.strategy, JobStrategy) or job is None:
            raise PlanError("JobLeaves is for a Trainer with a JobStrategy")
        self._trainer = trainer
        self._saver = self._stack.enter_context(
            Saver(job, None, every=self._every, save=self._save)
        )

    def _save(self) -> None:
        """In one move: Lightning's file is never beside another step's weights."""
        assert self._trainer is not None
        path = self.folder / f"asked-{self._trainer.global_step:08d}.ckpt"
        partial = path.with_suffix(".partial")
        self._trainer.save_checkpoint(partial)
        meet()
        self._saved = [*(one for one in self._saved if one != path), path]
        older, self._saved = self._saved[: -self._keep], self._saved[-self._keep :]
        if self._trainer.is_global_zero:
            partial.rename(path)
            for one in older:
                self._trainer.strategy.remove_checkpoint(one)
        meet()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Asks after each optimizer step."""
        assert self._saver is not None
        if not self._saver.job.accumulated and self._saver.stepped():
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Signals are the process's own again; SystemExit if the job leaves."""
        self._stack.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """So they are when training fails: then `on_fit_end` does not come."""
        self._stack.__exit__(type(exception), exception, exception.__traceback__)
