"""Layers of experts of all families of transformers that have some: traced, and compared with their
own forward and backward in float64.

python -m benchmarks.moe_families [FAMILY ...] [-o docs/results/moe_families.md]

A family's layer is the class that makes its experts, with a tiny config: routing, shared experts
and all. Found by reading the library, so that families that a later version adds are in the table.
"""

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.zoo.configs import settings
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.trace.loss_module import TrainingStep
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret

EXACT = 1e-10
"""Of the loss and of gradients, relative to the largest of their parameter."""
EXACT_IN_FLOAT32 = 1e-6
WIDTH, INNER, TOKENS, SAMPLES = 32, 16, 6, 2
_MODELS = Path(transformers.__file__).parent / "models"
_EXPERTS = re.compile(r"^class (\w+)\(nn\.Module(?:Dict)?\):", re.M)
_NAMED = re.compile(r"Experts$|(?<!Sparse)Moe$|MoE$|MoEBlock$|CDMoE$|MoeMLP$")
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "d_model": WIDTH, "moe_intermediate_size": INNER,
    "moe_hidden_size": WIDTH, "intermediate_size": INNER, "expert_ffn_hidden_size": INNER,
    "shared_expert_intermediate_size": INNER, "moe_shared_expert_intermediate_size": INNER,
    "ffn_hidden_size": INNER, "expert_ffn_dim": INNER, "d_ff": INNER, "encoder_ffn_dim": INNER,
    "n_group": 2, "topk_group": 1, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "top_k_experts": 2, "moe_top_k": 2, "moe_num_experts": 4,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_latent_size": None, "moe_topk": 2,
    "router_dtype": "float64", "moe_num_shared_experts": 1, "zero_expert_num": 2,
    "moe_k": 2, "router_jitter_noise": 0.0, "num_experts_per_token": 2,
}  # fmt: skip
"""What a config is given where it has such a setting."""
_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config"}
_OWN: dict[str, dict[str, Any]] = {
    "DeepseekV4Config": {"mlp_layer_types": ["moe", "moe"]},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": INNER},
    "SwitchTransformersConfig": {"expert_capacity": 2},  # of six tokens some are dropped
}
"""What a config is given beside that."""
_ALONE = {"inkling2"}
"""Families whose router insists on float32, so that only their experts are compared."""
OTHERWISE = {
    "doge": "its experts are rows of tables, looked up and multiplied as such: plain operators",
    "vitpose_backbone": "experts by data set, all on all tokens: plain operators",
    "jetmoe": "refused: experts are projections of attention, too, in runs of unknown lengths",
    "muse_spark": "batched products, which gather a weight for each token: a norm with parameters "
    "stands between an expert's result and its weight",
}
"""Families that are not one operator a layer, and why."""
ROUNDED = {
    "nemotron_h": "its own forward adds up in float32",
    "inkling2": "its own forward adds up in float32",
    "openai_privacy_filter": "its own forward computes in float32",
}
"""Families that can only be compared to the precision of float32, and why."""


class MoeStep(nn.Module):
    """A layer whose result becomes a scalar."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.picks = "top_k_index" in inspect.signature(layer.forward).parameters
        self.router = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of squares of the layer's first result; experts alone get a router of ours."""
        if not self.picks:
            made = self.layer(x)
            return (made[0] if isinstance(made, tuple) else made).pow(2).sum()
        flat = x.reshape(-1, WIDTH)
        weights, index = (flat @ self.router.view(WIDTH, 4)).softmax(-1).topk(2)
        return self.layer(flat, index, weights).pow(2).sum()


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """What became of a family's layer."""

    family: str
    layer: str
    operators: int = 0
    worst: float = 0.0
    """Of gradients, relative."""
    why: str = ""
    """Why it could not be compared, or was refused."""

    @property
    def stands(self) -> bool:
        """Whether it is one operator and exact."""
        allowed = EXACT_IN_FLOAT32 if self.family in ROUNDED else EXACT
        return not self.why and self.operators == 1 and self.worst <= allowed


def families() -> Iterator[str]:
    """Families of this version of transformers that have experts."""
    for path in sorted(_MODELS.glob("*/modeling_*.py")):
        if any(_NAMED.search(name) for name in _EXPERTS.findall(path.read_text())):
            yield path.parent.name


@cache
def _module_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def layers_of(family: str) -> Iterator[type[nn.Module]]:
    """Classes that make experts and are no model: those whose code names a class of experts."""
    module = _module_of(family)
    own = [
        c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__
    ]
    experts = [c for c in own if c.__name__.endswith("Experts")]
    for one in own:
        if issubclass(one, nn.Module) and "__init__" in vars(one):
            code = inspect.getsource(one.__init__)
            if found := [c for c in experts if re.search(rf"= {c.__name__}\(", code)]:
                alone = family in _ALONE or one.__name__.endswith("Layer")
                yield found[0] if alone else one


def config_of(layer: type[nn.Module]) -> Any:
    """A tiny config: of the class that the constructor asks for if that has experts, else of the
    first in the same file that has."""
    module = sys.modules[layer.__module__]
    asked = list(inspect.signature(layer.__init__).parameters.values())[1].annotation
    known = [
        c for n, c in vars(module).items() if n.endswith("Config") and hasattr(c, "model_type")
    ]
    known.sort(key=lambda c: (c.__name__ != asked and c is not asked, "Text" not in c.__name__))
    found = (made for made in map(_tiny, known) if _COUNTS & set(dir(made)))
    return next(found)


def _tiny(kind: Any) -> Any:
    config = kind()
    for key, value in (settings(kind) | _SIZES).items():
        name = getattr(config, "attribute_map", {}).get(key, key)
        if name in vars(config):
            had = vars(config)[name]
            vars(config)[name] = [value] * len(had) if isinstance(had, list | tuple) else value
    for nested in vars(config).values():
        if type(nested).__name__.endswith("Config"):
            vars(nested).update((k, v) for k, v in _SIZES.items() if hasattr(nested, k))
    vars(config).update(_OWN.get(kind.__name__, {}))
    config._experts_implementation = "eager"
    return config


def layer_of(cls: type[nn.Module]) -> nn.Module:
    """The layer in float64 with values of its own."""
    needed = [
        p for p in list(inspect.signature(cls.__init__).parameters.values())[2:]
        if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    layer = cls(
        config_of(cls), *(INNER if "dim" in p.name or "size" in p.name else 0 for p in needed)
    )
    layer = layer.to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in (*layer.parameters(), *layer.buffers()):
            if value.is_floating_point():
                value.copy_(
                    torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.3
                )
    return layer


def compare(family: str, cls: type[nn.Module]) -> FamilyResult:
    """Trace a layer and compare loss and all gradients with its own."""
    named = FamilyResult(family, cls.__name__)
    step = MoeStep(layer_of(cls))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    batch = {"x": x}
    eager, ours = deepcopy(step), deepcopy(step)
    expected = TrainingStep(eager, None, ("x",))(x)
    expected.backward()
    try:
        graph = trace(step, batch)
    except MeshwrightError as error:
        return FamilyResult(family, cls.__name__, why=str(error))
    loss = interpret(graph, ours, batch)[graph.loss]
    loss.backward()
    errors = [float(((loss - expected) / expected).detach().abs())]
    grads = [
        [torch.zeros_like(p) if p.grad is None else p.grad for p in one.parameters()]
        for one in (eager, ours)
    ]
    grads = [[g for g in some if g.numel()] for some in grads]
    largest = max(float(g.abs().max()) for g in grads[0])
    for a, b in zip(*grads, strict=True):
        # Where routing weights add up to 1, a router's gradient is nothing but rounding.
        errors.append(float((a - b).abs().max() / a.abs().max().clamp(min=1e-6 * largest)))
    worst = float("nan") if any(map(isnan, errors)) else max(errors)
    operators = sum(op.target == EXPERTS_TARGET for op in graph.ops)
    return FamilyResult(family, named.layer, operators, worst)


def results(wanted: Sequence[str]) -> Iterator[FamilyResult]:
    """All layers of these families."""
    for family in wanted:
        if family in OTHERWISE:
            yield FamilyResult(family, "", why=OTHERWISE[family])
            continue
        for cls in dict.fromkeys(layers_of(family)):
            yield compare(family, cls)


_TEXT = """\
# Layers of experts in transformers

{day}, `python -m benchmarks.moe_families`, transformers {version}. Every family that has experts,
by the class that makes them: routing, shared experts and all, with a tiny config in float64.
`one op`: the traced layer has one `meshwright.experts`. `furthest`: how far the loss or a gradient
is from the layer's own forward and backward, relative to the largest value of that gradient.

{good} of {all} layers are one operator and exact: {exact} to 1e-10, the others to 1e-6, as their
own code rounds to float32. What is not one operator was not run for this table.

"""


def row(one: FamilyResult) -> str:
    """A line of the table."""
    if one.why:
        return f"| {one.family} | | | {one.why} |"
    note = f", as {ROUNDED[one.family]}" if one.family in ROUNDED else ""
    single = "yes" if one.operators == 1 else "no"
    return f"| {one.family} | {one.layer} | {single} | {one.worst:.1e}{note} |"


def main() -> int:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    found = []
    for one in results(options.families or list(families())):
        found.append(one)
        print(row(one), flush=True)
    good = sum(one.stands for one in found)
    bad = [one.family for one in found if not one.stands and one.family not in OTHERWISE]
    if options.output:
        text = _TEXT.format(
            day=date.today().isoformat(),
            version=transformers.__version__,
            good=good,
            exact=sum(one.stands and one.family not in ROUNDED for one in found),
            all=len(found),
        )
        head = ["| family | layer | one op | furthest |", "|---|---|---|---|"]
        options.output.write_text(text + "\n".join([*head, *map(row, found)]) + "\n")
    print(f"{good} of {len(found)} stand; wrong: {', '.join(bad) or 'none'}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
