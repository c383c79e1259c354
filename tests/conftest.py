"""Settings that every test needs."""

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import settings

# Tests fork ranks; a parent that has used several OpenMP threads makes forked children hang.
torch.set_num_threads(1)

# What is found out about operators is kept for the run of the tests, not among the user's files.
os.environ["MESHWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="meshwright-tests-")

# Tests compare jobs with plain PyTorch themselves; those of the check turn it on.
os.environ.setdefault("MESHWRIGHT_CHECK", "0")

# Precisions that only tests ask for.
os.environ.setdefault("MESHWRIGHT_PRECISIONS", str(Path(__file__).parent / "precisions"))

# Cores are shared: how long an example takes says nothing.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")
