"""Settings that every test needs."""

import torch

# Tests fork ranks; a parent that has used several OpenMP threads makes forked children hang.
torch.set_num_threads(1)
