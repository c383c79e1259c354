"""All that the runtime uses of torch and that torch does not call public.

Checked on torch 2.13 (see tests/runtime/test_torch_private.py).
"""

import torch
from torch.distributed.distributed_c10d import _get_default_store

CHECKED_ON = "2.13"


def default_store() -> "torch._C._distributed_c10d.Store":
    """The store through which the ranks of the default process group met."""
    return _get_default_store()
