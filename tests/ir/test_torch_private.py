"""What we use of torch that is not public does what we think, on the versions named there."""

import pytest
import torch
import torch.distributed as dist

from meshwright.ir import torch_errors
from meshwright.ir import torch_private as private
from meshwright.testing.spawn import run_ranks

aten = torch.ops.aten


def test_version_was_checked() -> None:
    assert torch.__version__.startswith(private.CHECKED_ON)


def test_what_operators_write_and_view() -> None:
    assert private.written_arguments(aten.add_.Tensor) == ("self",)
    assert private.written_arguments(aten.add.Tensor) == ()
    assert private.makes_view(aten.view.default)
    assert not private.makes_view(aten.add_.Tensor)
    assert [a.name for a in private.schema_arguments(aten.relu.default)] == ["self"]


def test_fake_and_real() -> None:
    with private.fake_mode():
        huge = torch.empty(1 << 40)
        view = huge.view(1 << 20, 1 << 20)[1:]
        with private.real_mode():
            assert torch.ones(2).sum().item() == 2
    assert private.storage_key(huge) == private.storage_key(view)
    real = torch.ones(4)
    assert private.storage_key(real[1:]) == private.storage_key(real)
    assert private.storage_key(real) != private.storage_key(torch.ones(4))


def test_every_update_in_one_kernel_runs_without_memory() -> None:
    makers = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW)
    with private.updates_without_memory(), private.fake_mode():
        for make in makers:
            weight = torch.nn.Parameter(torch.empty(1 << 40))
            weight.grad = torch.empty_like(weight)
            make([weight], lr=0.1, fused=True).step()
    with private.fake_mode(), pytest.raises(RuntimeError):  # takes memory to find out
        torch._fused_sgd_(
            [weight], [weight], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip


def test_errors_of_the_fake_mode() -> None:
    with private.fake_mode(), pytest.raises(torch_errors.DATA_DEPENDENT) as error:
        bool(torch.ones(2).sum() > 0)
    assert torch_errors.operator_of(error.value) == "aten._local_scalar_dense.default"


def _collectives():
    rank = dist.get_rank()
    gathered = torch.empty(4)
    private.all_gather(gathered, torch.full((2,), float(rank)), None)
    part = torch.empty(2)
    private.reduce_scatter(part, torch.arange(4.0), None).wait()
    store = private.job_store()
    store.set(f"key{rank}", str(rank))
    return gathered.tolist(), part.tolist(), store.get(f"key{1 - rank}")


def test_collectives_and_store():
    first, second = run_ranks(2, _collectives)
    assert first == ([0, 0, 1, 1], [0, 2], b"1")
    assert second == ([0, 0, 1, 1], [4, 6], b"0")
