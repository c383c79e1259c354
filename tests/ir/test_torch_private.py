"""The private parts of torch that tracing stands on, on the versions they were checked on."""

import pytest
import torch

from meshwright.ir import torch_private as private

aten = torch.ops.aten


def test_version_was_checked() -> None:
    assert torch.__version__.startswith(private.CHECKED_ON)


def test_what_operators_write_and_view() -> None:
    assert private.written_arguments(aten.add_.Tensor) == ("self",)
    assert private.written_arguments(aten.add.Tensor) == ()
    assert private.makes_view(aten.view.default)
    assert not private.makes_view(aten.add_.Tensor)
    assert [a.name for a in private.schema_arguments(aten.relu.default)] == ["self"]
    assert private.resolve_target("aten.add.Tensor") is aten.add.Tensor


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


def test_errors_of_the_fake_mode() -> None:
    with private.fake_mode(), pytest.raises(private.DATA_DEPENDENT) as error:
        bool(torch.ones(2).sum() > 0)
    assert private.operator_of(error.value) == "aten._local_scalar_dense.default"
