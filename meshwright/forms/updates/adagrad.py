"""Adagrad (Duchi et al. 2011): the sum of all squares so far."""

import torch

from meshwright.forms.updates import Group, Update


def rests(group: Group) -> bool:
    """Zeros are added to the sum; without `eps` 0 would be divided by 0."""
    return not group["weight_decay"] and bool(group["eps"])


UPDATE = Update(
    kind=torch.optim.Adagrad, copies=1, passes=5, rests=rests, elsewhere={"deepspeed": "Adagrad"}
)
