"""Batch norm whose statistics are of all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.statistics import batch_norm
from meshwright.testing.spawn import run_ranks


def _in_parts() -> tuple[list[float], list[int], int]:
    """Differences from torch's own on all samples; bytes of what autograd keeps of a picture's
    size; messages of a backward to the weight alone."""
    rank = dist.get_rank()
    comm = Comm({"dp": dist.group.WORLD}, {"dp": 2}, {"dp": rank})
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 6, 5, 4, 3).unbind()
    weight, bias = (torch.randn(5).requires_grad_() for _ in range(2))
    own = slice(0, 4) if rank == 0 else slice(4, 6)
    part = x[own].clone().requires_grad_()
    wanted = torch.batch_norm(x.requires_grad_(), weight, bias, None, None, True, 0.1, 1e-5, False)
    whole = torch.autograd.grad(wanted, [x, weight, bias], gradient)

    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.ndim == 4:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = batch_norm(
            comm, part, weight, bias, None, None, 0.1, 1e-5, axes=("dp",), count=6 * 12
        )
    found = torch.autograd.grad(made, [part, weight, bias], gradient[own], retain_graph=True)
    for one in found[1:]:
        dist.all_reduce(one)
    differs = [float((a - b).abs().max()) for a, b in [
        (made, wanted[own]), (found[0], whole[0][own]), *zip(found[1:], whole[1:], strict=True)
    ]]  # fmt: skip
    comm.log = []
    torch.autograd.backward(made, gradient[own], inputs=[weight])
    return differs, [*kept.values()], len(comm.log)


def test_statistics_of_all_ranks_keep_what_is_read_alone() -> None:
    for rank, (differs, kept, sent) in enumerate(run_ranks(2, _in_parts)):
        assert differs == pytest.approx([0.0] * 4, abs=1e-5)
        assert kept == [(4, 2)[rank] * 5 * 4 * 3 * 4]
        assert not sent
