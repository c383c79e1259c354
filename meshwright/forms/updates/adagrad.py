"""Adagrad (Duchi et al. 2011): the sum of all squares so far."""

import torch

from meshwright.forms.updates import Update

UPDATE = Update(kind=torch.optim.Adagrad, copies=1, passes=5, elsewhere={"deepspeed": "Adagrad"})
