"""The environments: gymnasium's own check, and masks that offer only what is legal."""

from itertools import product

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO

from benchmarks.auto_map.exact import instance, operators
from meshwright.ir.layout.layout import Shard
from meshwright.ir.plan.verify import verify
from meshwright.planner.problem.problem import Problem
from meshwright.planner.searchers.dqn.batch_dims import BatchDims
from meshwright.planner.searchers.dqn.decisions import WORST, Pruning
from meshwright.planner.searchers.dqn.envs import (
    IDS,
    DecisionEnv,
    OperatorPartitionEnv,
    PipelinePartitionEnv,
)
from meshwright.planner.searchers.dqn.operators import Operators
from meshwright.planner.searchers.dqn.pipelines import Pipelines
from tests.planner.problems import TINY, cluster, mlp, problem, traced


def sequential() -> Problem:
    return problem(traced("sequential"), cluster(4))


MADE = {
    "meshwright/OperatorPartition-v0": lambda: {"problem": sequential(), "model": (("tp", 2),)},
    "meshwright/DataParallel-v0": lambda: {"graph": traced("sequential")},
    "meshwright/PipelinePartition-v0": lambda: {"problem": sequential()},
}


def episode(env: DecisionEnv, rng: np.random.Generator) -> float:
    """One of legal options only, each as likely."""
    env.reset()
    over, total = False, 0.0
    while not over:
        action = rng.choice(np.flatnonzero(env.action_masks()))
        _, reward, over, _, info = env.step(action)
        assert info["legal"]
        total += float(reward)
    return total


@pytest.mark.parametrize("name", IDS)
def test_gymnasium_accepts_them(name: str) -> None:
    env = gymnasium.make(name, **MADE[name]())
    check_env(env.unwrapped, skip_render_check=True)
    first, _ = env.reset(seed=0)
    again, _ = env.reset(seed=1)
    assert all(np.array_equal(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", IDS)
def test_what_is_masked_ends_the_episode(name: str) -> None:
    env = gymnasium.make(name, **MADE[name]()).unwrapped
    env.reset()
    rng, refused = np.random.default_rng(0), 0
    for _ in range(40):
        masks = env.action_masks()
        bad = np.flatnonzero(~masks)
        if len(bad) and rng.random() < 0.3:
            _, reward, over, _, info = env.step(bad[0])
            assert over and reward == WORST and not info["legal"]
            refused += 1
        else:
            _, _, over, _, _ = env.step(rng.choice(np.flatnonzero(masks)))
        if over:
            env.reset()
    assert refused or name != "meshwright/PipelinePartition-v0"


@pytest.mark.parametrize("name", ["pipeline", "placed", "zero bubble", "tight", "sharded"])
def test_masks_offer_no_plan_that_verify_refuses(name: str) -> None:
    asked = TINY[name]()
    env, rng = PipelinePartitionEnv(asked), np.random.default_rng(1)
    for _ in range(12):
        episode(env, rng)
    decisions = env.decisions
    assert isinstance(decisions, Pipelines) and len(decisions.judge.seen) > 5
    for plan in decisions.judge.drained():
        assert verify(plan, asked.graph, asked.cluster) == ()


@pytest.mark.parametrize("model", [(("tp", 2),), (("tp_row", 2), ("tp_col", 2))])
def test_linked_decisions_never_break_a_rule(model: tuple[tuple[str, int], ...]) -> None:
    env, rng = OperatorPartitionEnv(sequential(), model), np.random.default_rng(2)
    found = [episode(env, rng) for _ in range(12)]
    assert min(found) > WORST


def test_without_linkage_rules_can_be_broken() -> None:
    asked = sequential()
    env = OperatorPartitionEnv(asked, (("tp", 2),), Pruning(linkage=False))
    assert isinstance(env.decisions, Operators)
    linked = OperatorPartitionEnv(asked, (("tp", 2),))
    assert isinstance(linked.decisions, Operators)
    assert len(env.decisions.linkage.groups) > len(linked.decisions.linkage.groups)
    env.reset()
    over, reward = False, 0.0
    while not over:
        _, reward, over, _, _ = env.step(np.int64(1))  # split every dim of every parameter
    assert reward == WORST


def test_memory_rules_out_only_what_does_not_fit() -> None:
    asked = instance(3, most_groups=6).with_memory(0.6)
    pruned, free = (operators(asked, Pruning(memory=memory)) for memory in (True, False))
    every = list(product((0, 1), repeat=len(free.linkage.groups)))
    legal = [bits for bits in every if free.is_legal(bits)]
    left_out = [bits for bits in legal if not pruned.is_legal(bits)]
    assert 0 < len(left_out) < len(legal)
    assert not any(free.judged(bits).verdict.fits for bits in left_out)
    env, rng = DecisionEnv(pruned), np.random.default_rng(3)
    for _ in range(20):
        episode(env, rng)
    assert not set(pruned.found) & set(left_out[1:])  # the first, all whole, is the reference


@pytest.mark.parametrize("name", IDS)
def test_every_number_has_a_name(name: str) -> None:
    env = gymnasium.make(name, **MADE[name]()).unwrapped
    assert isinstance(env, DecisionEnv)
    observed, _ = env.reset()
    assert observed["context"].shape == (len(env.decisions.context_names),)
    assert observed["options"].shape[1] == len(env.decisions.option_names)


def test_decisions_hold_in_the_layout() -> None:
    """What is split is stored split along one of the group's dims, what is not is whole there."""
    agent = OperatorPartitionEnv(sequential(), (("tp", 2),)).decisions
    assert isinstance(agent, Operators)
    groups = agent.linkage.groups
    for number, group in enumerate(groups):
        bits = tuple(int(i == number) for i in range(len(groups)))
        left = agent.linkage.after(agent.linkage.everything(), number, True)
        for i, name in enumerate(agent.linkage.params):
            for place, keep in zip(agent.complete.space.params[name], left[i], strict=True):
                split = isinstance(place[0], Shard) and (name, place[0].dim) in group.dims
                assert keep == (split or i not in agent.linkage.touches[number])
        assert agent.judged(bits).verdict.value > 0


@pytest.mark.parametrize("name", ["gpt2", "sequential"])
def test_batch_dims_are_those_of_the_trace(name: str) -> None:
    """Of all ways to declare batch dims, the one that was traced shares most."""
    graph = traced(name)
    found = BatchDims(graph, Pruning())
    found.restart()
    for dim in found.dims:
        reward, _ = found.take(int(dim.dim == 0))
    assert {dim.name for dim in found.taken} == set(graph.batch_inputs)
    ways = _ways(found)
    assert reward == max(total for _, total in ways) > -0.1
    assert len({total for _, total in ways}) > 2


def _ways(found: BatchDims) -> list[tuple[tuple[int, ...], float]]:
    rows: list[tuple[tuple[int, ...], float]] = []
    for number in range(2 ** len(found.dims)):
        bits = tuple(number >> i & 1 for i in range(len(found.dims)))
        found.restart()
        reward, legal = 0.0, True
        for bit in bits:
            legal = legal and bool(found.offered().legal[bit])
            if not legal:
                break
            reward, _ = found.take(bit)
        if legal:
            rows.append((bits, reward))
    return rows


def test_radius_bounds_the_cuts() -> None:
    asked = problem(mlp(8), cluster(4), constraints=("num_microbatches=2",))
    near = PipelinePartitionEnv(asked, Pruning(radius=1)).decisions
    far = PipelinePartitionEnv(asked, Pruning(radius=None)).decisions
    assert isinstance(near, Pipelines) and isinstance(far, Pipelines)
    for decisions in (near, far):
        decisions.restart()
        decisions.take(0)
        decisions.take(0)
    cuts = [[o.draft.ends for o in d.options if o.kind == "cut"] for d in (near, far)]
    assert set(cuts[0]) < set(cuts[1])


def test_agents_of_other_kinds_learn_on_them() -> None:
    """One that knows of no masks: what it may not do ends its episodes."""
    env = gymnasium.make("meshwright/DataParallel-v0", **MADE["meshwright/DataParallel-v0"]())
    agent = PPO("MultiInputPolicy", env, n_steps=32, batch_size=16, n_epochs=1, device="cpu")
    agent.learn(64)
    assert agent.num_timesteps == 64 and agent.ep_info_buffer
