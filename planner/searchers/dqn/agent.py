"""A DQN agent that never takes, tries or hopes for what is masked, and looks at options alike.

The same small network scores each option from the context and the option's own features. So it has
as many weights for four options as for sixty, and what it has learnt holds for other models.
"""

from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import DQN
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from torch import Tensor, nn

NEVER = -1e9
"""Q-value of what is masked: finite, so that ends of episodes may multiply it by zero."""


class OptionNetwork(QNetwork):
    """Q-values of all options."""

    def __init__(self, observation_space: spaces.Dict, *args: Any, **settings: Any) -> None:
        super().__init__(observation_space, *args, **settings)
        context, options = observation_space["context"], observation_space["options"]
        assert context.shape and options.shape
        widths = [context.shape[0] + options.shape[1], *self.net_arch]
        layers = [
            layer
            for before, after in pairwise(widths)
            for layer in (nn.Linear(before, after), self.activation_fn())
        ]
        self.q_net = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, obs: PyTorchObs) -> Tensor:
        assert isinstance(obs, dict)
        options, legal = obs["options"], obs["mask"] > 0.5
        context = obs["context"].unsqueeze(1).expand(-1, options.shape[1], -1)
        values: Tensor = self.q_net(torch.cat([context, options], -1)[legal]).squeeze(-1)
        everything = torch.full(legal.shape, NEVER, dtype=values.dtype, device=values.device)
        return everything.masked_scatter(legal, values)


class OptionPolicy(DQNPolicy):
    """DQN's policy with this network."""

    def make_q_net(self) -> OptionNetwork:
        settings = self._update_features_extractor(self.net_args, features_extractor=None)
        return OptionNetwork(**settings).to(self.device)


class MaskedDQN(DQN):
    """The masks hold in acting, in exploring and in the maximum of the target."""

    policy_aliases: ClassVar[dict[str, Any]] = {"OptionPolicy": OptionPolicy}
    planned_steps = 0
    """Steps over which exploring becomes rare, in however many calls of `learn`."""

    def predict(  # type: ignore[override]
        self,
        observation: dict[str, NDArray[np.float32]],
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[np.int64], Any]:
        if not deterministic and np.random.rand() < self.exploration_rate:
            return any_legal(observation["mask"]), state
        return self.policy.predict(observation, state, episode_start, deterministic)

    def _sample_action(
        self, learning_starts: int, action_noise: Any = None, n_envs: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert isinstance(self._last_obs, dict)
        if self.num_timesteps < learning_starts:
            action = any_legal(self._last_obs["mask"])
        else:
            action, _ = self.predict(self._last_obs, deterministic=False)
        return action, action

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        total = max(self.planned_steps, total_timesteps)
        super()._update_current_progress_remaining(num_timesteps, total)


def any_legal(mask: NDArray[np.float32]) -> NDArray[np.int64]:
    """One of the legal options, of each row if there are several."""
    if mask.ndim > 1:
        return np.array([any_legal(row) for row in mask])
    return np.array(np.random.choice(np.flatnonzero(mask)))
