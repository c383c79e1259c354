"""Stochastic gradient descent with a momentum of 0.9."""

import torch

from meshwright.forms.updates import Update
from meshwright.forms.updates.sgd import STEP

UPDATE = Update(
    kind=torch.optim.SGD,
    settings={"momentum": 0.9},
    copies=1,
    passes=5,
    step=STEP,
    elsewhere={"megatron": "sgd"},  # which has momentum
)
