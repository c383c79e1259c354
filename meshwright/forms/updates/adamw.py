"""Adam that decays weights apart from their gradients (Loshchilov and Hutter 2019)."""

import torch

from meshwright.forms.updates import Update
from meshwright.forms.updates.adam import STEP

UPDATE = Update(
    kind=torch.optim.AdamW,
    copies=2,
    passes=7,
    step=STEP,
    # Megatron's adam decays weights as AdamW does.
    elsewhere={"deepspeed": "AdamW", "megatron": "adam", "torchtitan": "AdamW"},
)
