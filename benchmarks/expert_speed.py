"""Seconds of layers of experts as the library runs them, and as one operator.

python -m benchmarks.expert_speed [-o docs/results/expert_speed.md]

Forward and backward on one CPU core, process time, the two in turns, the fastest of each. Baselines
are transformers' own forwards: `eager`, a loop over experts, and `grouped_mm`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from meshwright.ir.trace.hf_experts import common_experts, set_up

TURNS = 5


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """A layer and how many tokens it gets."""

    kind: type[torch.nn.Module]
    config: Any
    tokens: int
    picked: int

    @property
    def experts(self) -> int:
        """Of the layer."""
        return int(getattr(self.config, "num_local_experts", self.config.num_experts))


CASES = {
    "8 wide experts": SpeedCase(
        MixtralExperts, MixtralConfig(hidden_size=256, intermediate_size=512), 512, 2
    ),
    "64 narrow experts": SpeedCase(
        Qwen3MoeExperts,
        Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=64, num_experts=64), 1024, 8,
    ),
    "32 experts with biases": SpeedCase(
        GptOssExperts, GptOssConfig(hidden_size=256, intermediate_size=256, num_local_experts=32),
        1024, 4,
    ),
}  # fmt: skip


def runs(case: SpeedCase) -> dict[str, Callable[[], torch.Tensor]]:
    """By name, a forward on the same values."""
    torch.manual_seed(0)
    case.config._experts_implementation = "eager"
    layer: Any = case.kind(case.config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    set_up(layer)
    x = torch.randn(case.tokens, case.config.hidden_size, requires_grad=True)
    weights = torch.rand(case.tokens, case.picked, requires_grad=True)
    index = torch.rand(case.tokens, case.experts).topk(case.picked).indices
    ours = MethodType(common_experts, layer)

    def by(way: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            layer.config._experts_implementation = way
            found: torch.Tensor = layer(x, index, weights)
            return found

        return call

    return {
        "eager": by("eager"),
        "grouped_mm": by("grouped_mm"),
        "ours": lambda: ours(x, index, weights),
    }


def seconds(case: SpeedCase) -> dict[str, float]:
    """By name, of a forward and a backward."""
    best: dict[str, float] = {}
    for _ in range(TURNS):
        for name, call in runs(case).items():
            begun = time.process_time()
            call().sum().backward()
            best[name] = min(best.get(name, float("inf")), time.process_time() - begun)
    return best


def rows() -> Iterator[str]:
    """Lines of the table."""
    yield "| layer | eager, ms | grouped_mm, ms | ours, ms | ours / eager | ours / grouped_mm |"
    yield "|---" * 6 + "|"
    for name, case in CASES.items():
        took = seconds(case)
        cells = [f"{1e3 * took[way]:.1f}" for way in ("eager", "grouped_mm", "ours")]
        ratios = [f"{took['ours'] / took[way]:.2f}" for way in ("eager", "grouped_mm")]
        yield f"| {name} | {' | '.join([*cells, *ratios])} |"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = list(rows())
    print("\n".join(lines))
    if options.output:
        head = (
            f"# Seconds of layers of experts\n\n{date.today().isoformat()}, `python -m "
            f"benchmarks.expert_speed`, one core of a shared CPU, transformers "
            f"{transformers.__version__}, float32, process time.\n\n"
        )
        options.output.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
