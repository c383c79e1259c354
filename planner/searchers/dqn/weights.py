"""Agents as files: weights as safetensors, what they are for as JSON beside them. No pickle."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from meshwright.ir.errors import PlanError
from meshwright.planner.searchers.dqn.agent import MaskedDQN
from meshwright.planner.searchers.dqn.decisions import Decisions

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Card:
    """What an agent is for, and how it was made."""

    decisions: str
    """Such as `Pipelines`."""
    context_size: int
    option_size: int
    widths: tuple[int, ...]
    trained_on: tuple[str, ...] = ()
    steps: int = 0
    seed: int = 0
    format: int = FORMAT


def card_of(decisions: Decisions, agent: MaskedDQN, **made: Any) -> Card:
    """Of an agent for these decisions."""
    widths = tuple(agent.q_net.net_arch)
    return Card(
        type(decisions).__name__, decisions.context_size, decisions.option_size, widths, **made
    )


def save_agent(agent: MaskedDQN, card: Card, path: Path) -> None:
    """`path` without suffix: two files."""
    state = {name: value.contiguous() for name, value in agent.q_net.state_dict().items()}
    save_file(state, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps(asdict(card), indent=1) + "\n")


def read_card(path: Path) -> Card:
    """What a saved agent is for."""
    found = json.loads(path.with_suffix(".json").read_text())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PlanError(f"{path}: not a saved agent of format {FORMAT}")
    return Card(
        str(found["decisions"]), int(found["context_size"]), int(found["option_size"]),
        tuple(map(int, found["widths"])), tuple(map(str, found["trained_on"])),
        int(found["steps"]), int(found["seed"]),
    )  # fmt: skip


def load_agent(agent: MaskedDQN, card: Card, path: Path) -> None:
    """Puts saved weights into an agent for decisions of the same kind."""
    found = read_card(path)
    for name in ("decisions", "context_size", "option_size", "widths"):
        if getattr(found, name) != getattr(card, name):
            raise PlanError(
                f"{path}: its {name} is {getattr(found, name)}, needed is {getattr(card, name)}; "
                "train an agent for these decisions"
            )
    state = load_file(path.with_suffix(".safetensors"))
    with torch.no_grad():
        agent.q_net.load_state_dict(state)
        agent.q_net_target.load_state_dict(state)
