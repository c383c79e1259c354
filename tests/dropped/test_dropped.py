"""A family of operators, or a fused kernel, is one file: of any name, in a folder of one's own."""

import json
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from meshwright.testing.fresh import python

HERE = Path(__file__).parent


def dropped(kind: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Copy the file under a random name; the name, and the environment that names the folder."""
    name = f"x{token_hex(4)}"
    text = (HERE / f"{kind}_file.py").read_text().replace("NAME", name)
    (folder / f"{name}.py").write_text(text)
    variable = "MESHWRIGHT_OPS" if kind == "family" else "MESHWRIGHT_KERNELS"
    return name, {variable: str(folder)}


def run(environment: dict[str, str], *command: str) -> str:
    done = python(*command, **environment)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["kernel", "family"])
def test_one_file_goes_the_whole_way(kind: str, tmp_path: Path) -> None:
    """Traced, split by the search, priced as it says, and run on two ranks as in one process."""
    name, environment = dropped(kind, tmp_path)
    found: dict[str, Any] = json.loads(
        run(environment, "-m", "tests.dropped.path", kind, name).splitlines()[-1]
    )
    assert found["ops"] == 2 and found["class"] == "transcendental"
    assert found["flops"] == {"kernel": 3, "family": 7}[kind] * 8 * 64
    assert any("S(1) -> S(1)" in text for text in found["strategies"]), found["strategies"]
    assert found["places"] == ({name: 2} if kind == "kernel" else {})
    assert found["seconds"] > 0 and found["step_s"] > 0
    assert found["difference"] <= 1e-9, found


def test_a_kernel_beside_a_collective_is_one_file_too(tmp_path: Path) -> None:
    """Its places are found, priced and called in each of them, on two ranks as in one process."""
    name, environment = dropped("joint", tmp_path)
    found = json.loads(run(environment, "-m", "tests.dropped.joint_path", name).splitlines()[-1])
    assert found["places"] == found["worth"] == 2 * found["layers"] and found["calls"] == 2
    assert found["difference"] <= 1e-9, found


def test_a_kernel_in_a_file_is_its_reference_and_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    name, environment = dropped("kernel", tmp_path)
    text = f"""
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from meshwright.ir.kernels import load
module = load({name!r})
operator, reference = module.OPERATORS[{name!r}]
x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradcheck(operator, (x,))
torch.testing.assert_close(operator(x), reference(x))
for build in module.builds("bf16", 128):
    signature = {{**build.signature, **dict.fromkeys(build.constants, "constexpr")}}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constants)
    made = compile(source, target=GPUTarget("cuda", 90, 32))
    print(".target sm_90" in made.asm["ptx"])
"""
    assert run(environment, "-c", text).split() == ["True"]


def test_two_files_that_say_the_same_are_refused(tmp_path: Path) -> None:
    text = (
        "from meshwright.ir.graph.op_facts import OpFacts\n"
        "FACTS = {'aten.rms_norm': OpFacts()}\n"
    )  # fmt: skip
    (tmp_path / "mine.py").write_text(text)
    ask = (
        "from meshwright.ir.errors import PlanError\n"
        "from meshwright.ir.ops import facts\n"
        "try:\n    facts('aten.add.Tensor')\nexcept PlanError as error:\n    print(error)"
    )
    said = run({"MESHWRIGHT_OPS": str(tmp_path)}, "-c", ask)
    assert "aten.rms_norm" in said and "keep one of them" in said
