"""What each rank runs in tests of profiling under torchrun."""

import os
import sys
import warnings
from pathlib import Path

import torch

import meshwright as mw
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.testing.models import CASES


def main(path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case, dtype = CASES["sequential"], torch.float32
    graph = trace(case.model(dtype), case.example(dtype=dtype), case.loss_fn)
    found = mw.profile(
        graph, Cluster.local(2), precision="fp32", path=path, minutes=0.15, progress=False
    )
    Path(f"{path}.{os.environ['RANK']}").write_text(found.fingerprint)


if __name__ == "__main__":
    main(sys.argv[1])
