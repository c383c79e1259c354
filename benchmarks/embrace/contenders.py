"""Those that train the same model on the same batches: plans of ours, DDP, and torchrec."""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.embrace.models import Batch, Case
from benchmarks.embrace.torchrec_rival import TorchrecRival, is_installed
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.job.compile import compile as compile_job

LR, OPTIMIZER = 0.01, "adagrad"
OURS, REPLICAS, PLAIN = "ours", "ours, replicas", "ours, tables whole"
DDP, SPARSE, TORCHREC = "DDP", "DDP, sparse tables", "torchrec"


class Contender(Protocol):
    """One rank's part of one of them."""

    def step(self, batch: Batch, after: Batch) -> object:
        """Trains on a batch, given whole as the next one is; returns when it is over."""

    def loss(self) -> float:
        """Of the last step, the mean over all samples; all ranks ask for it together."""


class Planned:
    """A job of a plan; it is told the next batch."""

    def __init__(self, case: Case, plan: Plan) -> None:
        self.job = compile_job(
            case.model(), plan, optimizer=OPTIMIZER, lr=LR, device="cpu", check=False,
            example_inputs=case.batch(0),
        )  # fmt: skip
        self._loss = 0.0

    def step(self, batch: Batch, after: Batch) -> float:
        self._loss = float(self.job.step(batch, next_batch=after))
        return self._loss

    def loss(self) -> float:
        return self._loss


class Replicated:
    """Torch's DDP as its users write it; tables `sparse` or not."""

    def __init__(self, case: Case, *, sparse: bool) -> None:
        self.model = DistributedDataParallel(case.model(sparse=sparse), broadcast_buffers=False)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=LR)
        self._loss = torch.zeros(())

    def step(self, batch: Batch, after: Batch) -> float:
        self.optimizer.zero_grad()
        loss = self.model(**own_part(batch))
        loss.backward()
        self.optimizer.step()
        self._loss = loss.detach()
        return float(self._loss)

    def loss(self) -> float:
        return mean_over_ranks(self._loss)


class Sharded:
    """Torchrec."""

    def __init__(self, case: Case, bits_per_s: float) -> None:
        self.rival = TorchrecRival(case, LR, bits_per_s)
        self._loss = torch.zeros(())

    def step(self, batch: Batch, after: Batch) -> float:
        self._loss = self.rival.step(own_part(batch))
        return float(self._loss)

    def loss(self) -> float:
        return mean_over_ranks(self._loss)


def contenders(case: Case, plans: Mapping[str, Plan], bits_per_s: float) -> dict[str, Contender]:
    """All that can run here, by name; `plans` by the names of ours."""
    found: dict[str, Contender] = {name: Planned(case, plan) for name, plan in plans.items()}
    found[DDP] = Replicated(case, sparse=False)
    found[SPARSE] = Replicated(case, sparse=True)
    if is_installed():
        found[TORCHREC] = Sharded(case, bits_per_s)
    return found


def own_part(batch: Batch) -> Batch:
    """This rank's samples."""
    parts, rank = dist.get_world_size(), dist.get_rank()
    return {name: x.chunk(parts)[rank] for name, x in batch.items()}


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
