"""The same models with torchrec's sharded tables, by its own planner, where it is installed.

`make rivals` puts it beside torch. It trains as its users write it: tables as its collections, the
rows of their optimizer stepped by its kernels, the rest by DDP.
"""

import importlib.util
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.embrace.models import Batch, Case, Language, Tabled


def is_installed() -> bool:
    """Tells whether torchrec and its kernels are here."""
    return all(importlib.util.find_spec(name) for name in ("torchrec", "fbgemm_gpu"))


class _Collected(nn.Module):
    """Torchrec's tables before the rest of a model: vectors of each lookup for the language model,
    bags of one for DLRM."""

    def __init__(self, case: Case, rest: nn.Module) -> None:
        import torchrec

        super().__init__()
        self.rest, self.sizes = rest, case.sizes
        self.sequences = case.kind is Language
        made: Any = torchrec.EmbeddingConfig if self.sequences else torchrec.EmbeddingBagConfig
        configs = [
            made(name=name, num_embeddings=rows, embedding_dim=width, feature_names=[name])
            for name, (rows, width) in case.sizes.items()
        ]
        kind: Any = (
            torchrec.EmbeddingCollection if self.sequences else torchrec.EmbeddingBagCollection
        )
        self.collection = kind(device=torch.device("meta"), tables=configs)

    def forward(self, ids: Any, lengths: Mapping[str, int], others: tuple[Tensor, ...]) -> Tensor:
        found = self.collection(ids)
        if not self.sequences:
            return self.rest([found[name] for name in self.sizes], *others)
        rows = [
            found[name].values().view(-1, lengths[name], width)
            for name, (_, width) in self.sizes.items()
        ]
        return self.rest(*rows, *others)


class TorchrecRival:
    """One rank's model, tables sharded and stepped by torchrec's kernels, the rest by DDP."""

    def __init__(self, case: Case, lr: float, bits_per_s: float) -> None:
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        for noisy in ("torchrec", "torch.fx"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        self.case, plain = case, case.model()
        own = _Collected(case, plain.rest)
        adagrad = {"lr": lr, "eps": 1e-10}
        apply_optimizer_in_backward(torch.optim.Adagrad, own.collection.parameters(), adagrad)
        sharders: Any = [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()]
        world = dist.get_world_size()
        batch = next(iter(case.batch(0).values())).shape[0]
        rate = bits_per_s / 8 / 1e3  # bytes a millisecond
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=world, compute_device="cpu", intra_host_bw=rate, inter_host_bw=rate
            ),
            batch_size=batch // world,
        )
        plan = planner.collective_plan(own, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(
            own, device=torch.device("cpu"), plan=plan, sharders=sharders
        )
        self.plan = {
            name: str(own_plan.sharding_type)
            for module in plan.plan.values() for name, own_plan in module.items()
        }  # fmt: skip
        self._fill(plain)
        rest = [p for name, p in self.model.named_parameters() if ".rest." in f".{name}"]
        self.optimizer = torch.optim.Adagrad(rest, lr=lr)

    def _fill(self, plain: Tabled) -> None:
        """The same values as the plain model's."""
        for path, sharded in self.model.state_dict().items():
            if "collection" not in path:
                continue
            whole = plain.tables[path.split(".")[-2]].weight.detach()
            for shard in sharded.local_shards():
                (row, column), (rows, columns) = (
                    shard.metadata.shard_offsets, shard.metadata.shard_sizes
                )  # fmt: skip
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])

    def step(self, own: Batch) -> Tensor:
        """Trains on this rank's samples; its loss."""
        from torchrec import KeyedJaggedTensor

        names = list(self.case.sizes)
        ids = [own[name].reshape(own[name].shape[0], -1) for name in names]
        lengths = torch.cat([torch.full((x.shape[0],), x.shape[1]) for x in ids])
        keyed = KeyedJaggedTensor(
            keys=names, values=torch.cat([x.flatten() for x in ids]), lengths=lengths
        )
        others = tuple(x for name, x in own.items() if name not in names)
        each = {name: x.shape[1] for name, x in zip(names, ids, strict=True)}
        self.optimizer.zero_grad()
        loss: Tensor = self.model(keyed, each, others)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
