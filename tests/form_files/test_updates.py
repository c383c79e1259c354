"""Each optimizer's file against what torch really does; a file of a user's own goes all the way."""

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel.memory.memory import optimizer_traffic, training_state
from meshwright.forms.sync import exchange
from meshwright.forms.trying import reach
from meshwright.forms.updates import UPDATES, update
from meshwright.ir.errors import PlanError
from meshwright.testing.fresh import python
from tests.form_files.small import difference, plan_for

ROWS = 64
SHAPES = [(ROWS, 32), (128, 8), (50,)]


def shapes(name: str) -> list[tuple[int, ...]]:
    """Those that the optimizer takes."""
    return [shape for shape in SHAPES if update(name).takes(shape)]


def size(name: str) -> int:
    return sum(4 * torch.Size(shape).numel() for shape in shapes(name))


class _Moved(TorchDispatchMode):
    """Bytes that ops read of tensors, and those of tensors that they change in place."""

    read = written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _large(x)]
        before = [x.clone() for x in given]
        result = func(*args, **kwargs or {})
        if func._schema.name in ("aten::mm", "aten::addmm"):
            return result  # products of matrices have a price of their own
        self.read += sum(x.nbytes for x in given)
        changed = [not torch.equal(x, old) for x, old in zip(given, before, strict=True)]
        self.written += sum(x.nbytes for x, new in zip(given, changed, strict=True) if new)
        known = {id(x) for x in given}
        made = [x for x in torch.utils._pytree.tree_leaves(result) if _large(x)]
        self.written += sum(x.nbytes for x in made if id(x) not in known)
        return result


def _large(x: object) -> bool:
    return isinstance(x, Tensor) and x.numel() > 1


def stepped(name: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter], _Moved]:
    """The second step: the first one makes the state."""
    generator = torch.Generator().manual_seed(0)
    tensors = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes(name)]
    made = update(name).make(tensors, 1e-2, fused=True)
    for _ in range(2):
        for x in tensors:
            x.grad = torch.randn(x.shape, generator=generator)
        with _Moved() as mode:
            made.step()
    return made, tensors, mode


@pytest.mark.parametrize("name", UPDATES)
def test_it_equals_one_process(name: str) -> None:
    if not update(name).exact:
        pytest.skip("it says that it is not exact")
    if update(name).dims:
        pytest.skip("it does not take all parameters of the model: test_by_owner")
    assert difference(plan_for(name)) <= 1e-9


@pytest.mark.parametrize("name", UPDATES)
def test_state_is_as_large_as_it_says(name: str) -> None:
    made, tensors, _ = stepped(name)
    state = [x for p in tensors for x in made.state[p].values() if isinstance(x, Tensor)]
    assert sum(x.nbytes for x in state if x.numel() > 1) == update(name).copies * size(name)
    assert sum(x.nbytes for x in state if x.numel() == 1) <= 8 * len(tensors)
    known = training_state(
        size(name), size(name), optimizer=name, exchange=exchange("zero0", 1), dp_shard=1
    )
    assert known.optimizer_bytes == update(name).copies * size(name)


@pytest.mark.parametrize("name", UPDATES)
def test_a_step_moves_what_it_says(name: str) -> None:
    """A fused kernel reads each tensor that it is given once and writes those that it changes. Op
    by op tensors are read and written again, of which caches hold part: RMSprop says 9 passes and
    its ops make 14."""
    *_, moved = stepped(name)
    found, known = moved.read + moved.written, optimizer_traffic(size(name), name)
    assert known == update(name).passes * size(name)
    if update(name).launches == 1:
        assert found == known
    else:
        assert known <= found <= 1.6 * known


@pytest.mark.parametrize("name", UPDATES)
def test_it_looks_at_no_more_than_it_says(name: str) -> None:
    form = update(name)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return form.make([p for group in groups for p in group["params"]], None, fused=False)

    unknown = type("Unknown", (form.kind,), {})  # so that it is tried
    assert reach(unknown, {"name": name}, make) is form.reach


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(PlanError, match="no optimizer 'adamx'; nearest is 'adam"):
        update("adamx")


LION = """
import torch
from meshwright.forms.updates import Update

class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p -= group["lr"] * (first * mean + (1 - first) * p.grad).sign()
                mean.mul_(second).add_(p.grad, alpha=1 - second)

UPDATE = Update(kind=Signed, copies=1, passes=9, launches=5, made=1)
"""
NORMED = """
import torch
from meshwright.forms.updates import Reach, Update

class Normed(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm().clamp_min(1e-6)

UPDATE = Update(kind=Normed, copies=0, passes=5, launches=3, made=1, reach=Reach.PARAMETER)
"""
PATH = """
from pathlib import Path
from tests.form_files.small import search_and_run
found = search_and_run(Path({folder!r}), {pins!r}, optimizer={name!r})
plan = found["plan"]
assert plan.optimizer == {name!r} and found["difference"] <= 1e-9, found["difference"]
print(max(s.memory.optimizer_bytes for s in plan.predicted.stages),
      [(s.zero, s.mesh) for s in plan.stages])
"""


def in_folder(folder: Path, text: str) -> CompletedProcess[str]:
    return python("-c", text, MESHWRIGHT_UPDATES=str(folder))


@pytest.mark.parametrize(
    ("text", "pins", "state"), [(LION, ("dp_shard=2", "zero=2"), True), (NORMED, (), False)]
)
def test_a_file_of_any_name_goes_the_whole_way(
    text: str, pins: tuple[str, ...], state: bool, tmp_path: Path
) -> None:
    name = f"u{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(text)
    done = in_folder(tmp_path, PATH.format(folder=str(tmp_path), pins=pins, name=name))
    assert done.returncode == 0, done.stderr[-3000:]
    held = int(done.stdout.split()[0])
    assert (held > 0) == state
    if not state:  # its step looks at whole parameters, so ranks hold those
        assert "(0, " in done.stdout and "'tp': 2" not in done.stdout, done.stdout


def test_a_claim_that_is_wrong_is_refused(tmp_path: Path) -> None:
    """A file that says that it steps each element by itself is tried before a job trusts it."""
    name = f"u{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(NORMED.replace(", reach=Reach.PARAMETER", ""))
    pins = ("dp_shard=2", "zero=2")
    done = in_folder(tmp_path, PATH.format(folder=str(tmp_path), pins=pins, name=name))
    assert done.returncode and "depends on the whole parameter" in done.stderr, done.stderr[-3000:]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    done = in_folder(tmp_path / "none", "import meshwright.forms.updates")
    assert "MESHWRIGHT_UPDATES" in done.stderr
