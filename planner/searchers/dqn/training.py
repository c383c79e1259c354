"""Trains an agent a few steps at a time, without touching anybody's random numbers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.logger import Logger, configure

from meshwright.ir.errors import PlanError
from meshwright.planner.searchers.dqn.agent import MaskedDQN
from meshwright.planner.searchers.dqn.envs import DecisionEnv

FORMATS = ("csv", "tensorboard")


@dataclass(frozen=True, slots=True)
class Settings:
    """How an agent learns."""

    steps: int
    """Over which exploring becomes rare."""
    learning_rate: float = 1e-3
    batch_size: int = 64
    starts: int = 64
    """Steps by chance before it learns."""
    every: int = 4
    """Steps between updates."""
    target_every: int = 100
    explore: float = 1.0
    """How often it tries something else: at first, and at the end."""
    explore_last: float = 0.05
    explore_part: float = 0.6
    width: int = 64


class Trainer:
    """One agent in one environment."""

    def __init__(
        self,
        env: DecisionEnv,
        settings: Settings,
        seed: int,
        log_dir: Path | None = None,
    ) -> None:
        self._held: _Randomness | None = None
        with self._own():
            self.agent = MaskedDQN(
                "OptionPolicy", env, learning_rate=settings.learning_rate,
                buffer_size=min(settings.steps, 50_000), learning_starts=settings.starts,
                batch_size=settings.batch_size, gamma=1.0, train_freq=settings.every,
                gradient_steps=1, target_update_interval=settings.target_every,
                exploration_fraction=settings.explore_part,
                exploration_initial_eps=settings.explore,
                exploration_final_eps=settings.explore_last, seed=seed, device="cpu",
                policy_kwargs={"net_arch": [settings.width, settings.width]},
            )  # fmt: skip
        self.agent.planned_steps = settings.steps
        self.agent.set_logger(_logger(log_dir))
        self.done = 0

    def learn(self, steps: int) -> None:
        """So many more steps."""
        with self._own():
            self.agent.learn(steps, reset_num_timesteps=not self.done, log_interval=16)
        self.done += steps

    def close(self) -> None:
        """Ends the log."""
        self.agent.logger.close()

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Random numbers of the agent's own, and one thread: so equal seeds give equal agents."""
        threads, before = torch.get_num_threads(), _Randomness.now()
        torch.set_num_threads(1)
        if self._held:
            self._held.restore()
        try:
            yield
        finally:
            self._held = _Randomness.now()
            before.restore()
            torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class _Randomness:
    """The state of all generators that SB3 draws from."""

    python: object
    numpy: object
    torch: torch.Tensor

    @classmethod
    def now(cls) -> "_Randomness":
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)  # type: ignore[arg-type]
        np.random.set_state(self.numpy)  # type: ignore[arg-type]
        torch.set_rng_state(self.torch)


def _logger(log_dir: Path | None) -> Logger:
    """Silent, or to files that TensorBoard and spreadsheets read."""
    if log_dir is None:
        return Logger(None, [])
    try:
        return configure(str(log_dir), list(FORMATS))
    except AssertionError as error:  # what SB3 raises where a package is missing
        raise PlanError(
            "logging to TensorBoard needs the package tensorboard: pip install tensorboard"
        ) from error
