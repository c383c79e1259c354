"""Ranks of tests look like those that torchrun starts."""

import os

import torch.distributed as dist


def as_torchrun() -> None:
    """Sets what torchrun sets."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                   "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # fmt: skip
