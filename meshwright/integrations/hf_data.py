"""Batches of a Trainer with a job: every rank reads the same ones, in the order of one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from meshwright.ir.errors import PlanError


class EpochSampler(Sampler[int]):
    """All samples in an order of the epoch's own, as accelerate's sampler has it for one process.

    Training that goes on within an epoch so reads what the epoch has left.
    """

    def __init__(self, count: int, seed: int, trained: Callable[[], float | None]) -> None:
        self._count, self._seed, self._trained = count, seed, trained

    def __iter__(self) -> Iterator[int]:
        epoch = int((self._trained() or 0.0) + 1e-6)
        generator = torch.Generator().manual_seed(self._seed + epoch)
        yield from torch.randperm(self._count, generator=generator).tolist()

    def __len__(self) -> int:
        return self._count


def batches(
    trainer: Trainer, dataset: Any, sampler: EpochSampler | None, name: str
) -> DataLoader[Any]:
    """A loader of the plan's global batches; PlanError if some samples would be left out unsaid."""
    args, size = trainer.args, trainer.plan.global_batch_size  # type: ignore[attr-defined]
    _check_rest(dataset, size, bool(args.dataloader_drop_last), name)
    collator: Any = trainer.data_collator
    if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
        dataset = trainer._remove_unused_columns(dataset, description=name)
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description=name)
    # Workers of all ranks draw the same numbers: there is one batch.
    seeding = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=0)
    return DataLoader(
        dataset, size, sampler=sampler, drop_last=True, collate_fn=collator,
        num_workers=args.dataloader_num_workers, worker_init_fn=seeding,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        in_order=getattr(args, "dataloader_in_order", True),
    )  # fmt: skip


def _check_rest(dataset: Any, size: int, dropped: bool, name: str) -> None:
    if dropped:
        return
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise PlanError(
            f"the {name} dataset has no length, so its last batch may have fewer samples than the "
            f"plan's {size}: dataloader_drop_last=True leaves such a batch out"
        )
    if rest := len(dataset) % size:
        raise PlanError(
            f"the {name} dataset has {len(dataset)} samples, and the plan's global batch {size}: "
            f"dataloader_drop_last=True leaves out the last {rest}, or give it "
            f"{len(dataset) - rest or size}"
        )


def check_counts(found: Sequence[Any], *, shifted: bool) -> None:
    """PlanError unless batches of one optimizer step have as many labels that count.

    Trainer then weighs each by its labels; a job adds batches that count the same.
    """
    labels: list[Any] = [batch.get("labels") for batch in found if isinstance(batch, Mapping)]
    if len(labels) < 2 or not all(isinstance(one, Tensor) for one in labels):
        return
    counts = {int((one[..., 1:] if shifted else one).ne(-100).sum()) for one in labels}
    if len(counts) > 1:
        raise PlanError(
            f"gradient_accumulation_steps: batches of one step have {min(counts)} to {max(counts)} "
            "labels that count, and a job gives each batch the same weight: search a plan with a "
            "larger global batch and more micro-batches instead, which weighs each label alike"
        )
