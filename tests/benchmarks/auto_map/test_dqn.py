"""The agent and its searcher: masks hold everywhere, seeds decide all, weights survive a file."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.auto_map.exact import SEEDS, brute_force, instance, learned, operators
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan_io import dumps
from meshwright.planner.search.search import search_problem
from meshwright.planner.searchers.dqn.agent import NEVER, any_legal
from meshwright.planner.searchers.dqn.decisions import Decisions, Pruning
from meshwright.planner.searchers.dqn.envs import DecisionEnv, PipelinePartitionEnv
from meshwright.planner.searchers.dqn.explore import SHIPPED
from meshwright.planner.searchers.dqn.training import Settings, Trainer
from meshwright.planner.searchers.dqn.weights import card_of, load_agent, read_card, save_agent
from tests.planner.problems import TINY


def decisions() -> Decisions:
    return PipelinePartitionEnv(TINY["pipeline"]()).decisions


def trainer(seed: int = 0) -> Trainer:
    env = PipelinePartitionEnv(TINY["pipeline"]())
    return Trainer(env, Settings(steps=200, starts=32), seed)


def test_masked_options_are_worth_nothing() -> None:
    agent = trainer().agent
    env = agent.get_env()
    assert env
    observed = env.reset()
    assert isinstance(observed, dict)
    mask = observed["mask"][0] > 0.5
    tensors = {key: torch.as_tensor(value) for key, value in observed.items()}
    for network in (agent.q_net, agent.q_net_target):
        values = network(tensors)[0].detach().numpy()
        assert (values[~mask] == NEVER).all() and (values[mask] > NEVER / 2).all()
    assert mask[int(agent.predict(observed, deterministic=True)[0][0])]


def test_exploring_takes_legal_options_only() -> None:
    mask = np.array([0, 1, 0, 1], np.float32)
    assert {int(any_legal(mask)) for _ in range(60)} == {1, 3}


def test_learning_never_tries_what_is_masked() -> None:
    learner = trainer()
    env = learner.agent.get_env()
    assert env
    learner.learn(200)
    buffer = learner.agent.replay_buffer
    assert buffer and buffer.size() == 200
    taken = buffer.actions[:200, 0, 0]
    masks = buffer.observations["mask"][:200, 0]  # type: ignore[call-overload]
    assert (masks[np.arange(200), taken] == 1).all()


def test_equal_seeds_learn_alike_in_pieces_too() -> None:
    first, second, other = trainer(), trainer(), trainer(1)
    state = random.getstate(), torch.get_rng_state()
    for learner in (first, second, other):
        learner.learn(120)
    assert state[0] == random.getstate() and torch.equal(state[1], torch.get_rng_state())
    weights = [learner.agent.q_net.state_dict() for learner in (first, second, other)]
    same = [all(torch.equal(weights[0][k], w[k]) for k in w) for w in weights[1:]]
    assert same == [True, False]


def test_weights_survive_a_file(tmp_path: Path) -> None:
    first, second = trainer(), trainer(1)
    first.learn(80)
    assert first.agent.get_env()
    card = card_of(decisions(), first.agent, trained_on=("pipeline",), steps=80)
    save_agent(first.agent, card, tmp_path / "agent")
    assert read_card(tmp_path / "agent") == card
    load_agent(second.agent, card_of(decisions(), second.agent), tmp_path / "agent")
    for key, value in first.agent.q_net.state_dict().items():
        assert torch.equal(second.agent.q_net.state_dict()[key], value)


def test_weights_of_another_form_are_refused(tmp_path: Path) -> None:
    agent = trainer().agent
    card = card_of(decisions(), agent)
    save_agent(agent, replace(card, option_size=3), tmp_path / "agent")
    with pytest.raises(PlanError, match="option_size is 3, needed is"):
        load_agent(agent, card, tmp_path / "agent")
    (tmp_path / "agent.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(PlanError, match="format"):
        read_card(tmp_path / "agent")


def test_progress_is_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    asked = replace(TINY["zero bubble"](), log_dir=tmp_path)
    search_problem(asked, "dqn")
    written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert "progress.csv" in written and any(name.startswith("events") for name in written)


def test_equal_seeds_give_equal_plans() -> None:
    asked = TINY["zero bubble"]()
    plans = [dumps(search_problem(replace(asked, seed=7, solved={}), "dqn")) for _ in range(2)]
    assert plans[0] == plans[1]


def test_only_training_is_logged(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="trains nothing that could be logged"):
        search_problem(replace(TINY["zero bubble"](), log_dir=tmp_path), "ilp")


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_agent_finds_the_best_of_all_partitions(seed: int) -> None:
    """A few instances with few groups; the benchmark has all of them, with up to twelve."""
    agent = operators(instance(seed, most_groups=6), Pruning())
    best, _ = brute_force(agent)
    found = learned(agent.afresh(), seed=0)
    assert found.simulated <= len(agent.found)
    assert found.value == pytest.approx(best, rel=1e-9)


def test_environment_of_the_agent_is_the_registered_one() -> None:
    assert isinstance(trainer().agent.get_env().envs[0].unwrapped, DecisionEnv)  # type: ignore[union-attr]


def test_the_shipped_agent_fits_the_decisions() -> None:
    """Else every search would fail, or begin cold: who changes what is observed trains it anew."""
    learner = trainer()
    before = {key: value.clone() for key, value in learner.agent.q_net.state_dict().items()}
    load_agent(learner.agent, card_of(decisions(), learner.agent), SHIPPED)
    after = learner.agent.q_net.state_dict()
    assert not any(torch.equal(before[key], after[key]) for key in before)
    assert read_card(SHIPPED).steps > 0 and read_card(SHIPPED).trained_on
