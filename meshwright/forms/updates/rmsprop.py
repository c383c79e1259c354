"""RMSprop: a running mean of squares. Torch has no fused kernel for it."""

import torch

from meshwright.forms.updates import Update

UPDATE = Update(
    kind=torch.optim.RMSprop,
    copies=1,
    passes=13,  # five kernels, each of which reads and writes all values again
    launches=6,
    made=1,  # the root of the squares
)
