"""Text of the report is readable: 4.5 to 1 against what is behind it, light and dark (WCAG 2.1)."""

import re
from pathlib import Path

import pytest

import meshwright.tools.report as report

THEME = (Path(report.__file__).parent / "page" / "theme.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in THEME.split("@media", 1))
ON_PAPER = ("ink", "soft", "bad", "good")
BARS = (
    "forward", "backward", "weight", "recompute", "tensor", "gradients", "gather", "optimizer",
    "overhead", "offload", "parameters", "activations", "communication", "workspace", "inputs",
    "axis-tp", "axis-cp", "axis-ep", "axis-row", "axis-col", "axis-depth", "axis-dp",
)  # fmt: skip


def light_of(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((light_of(one), light_of(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
def test_text_stands_out(theme: dict[str, str]) -> None:
    pairs = [(text, paper) for text in ON_PAPER for paper in ("paper", "card")]
    pairs += [("on-bar", bar) for bar in BARS] + [("on-accent", "accent")]
    pairs += [("soft", "whole"), ("soft", "wait"), ("ink", "track"), ("paper", "ink")]
    found = {pair: contrast(theme[pair[0]], theme[pair[1]]) for pair in pairs}
    assert not {pair: round(value, 2) for pair, value in found.items() if value < 4.5}
