"""Gymnasium environments around decisions, with registered ids.

All three share one form. An observation is a dict: `context` (numbers of the whole), `options` (a
row of numbers per option) and `mask` (1 where an option is legal). An action is the number of an
option. Taking one that is not legal ends the episode with `WORST`. `action_masks()` gives the mask
as booleans, as maskable agents of other libraries ask for it. `decisions.context_names` and
`decisions.option_names` say what the numbers are.

Importing `meshwright.planner.searchers.dqn.envs` registers them; each is made from a problem:

    gymnasium.make("meshwright/OperatorPartition-v0", problem=problem, model=(("tp", 4),))
    gymnasium.make("meshwright/DataParallel-v0", graph=graph)
    gymnasium.make("meshwright/PipelinePartition-v0", problem=problem)
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.problem.problem import Problem
from meshwright.planner.searchers.dqn.batch_dims import BatchDims
from meshwright.planner.searchers.dqn.decisions import WORST, Decisions, Offered, Pruning
from meshwright.planner.searchers.dqn.judge import Judge
from meshwright.planner.searchers.dqn.operators import Operators
from meshwright.planner.searchers.dqn.pipelines import Pipelines

Observation = dict[str, NDArray[np.float32]]
LIMIT = 100.0
"""Features are cut off here."""


class DecisionEnv(gymnasium.Env[Observation, np.int64]):
    """Any decisions as an environment. They do not depend on chance, so seeds change nothing."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, decisions: Decisions) -> None:
        self.decisions = decisions
        most = decisions.most_options
        self.observation_space: spaces.Dict = spaces.Dict({  # type: ignore[assignment]
            "context": spaces.Box(-LIMIT, LIMIT, (decisions.context_size,), np.float32),
            "options": spaces.Box(-LIMIT, LIMIT, (most, decisions.option_size), np.float32),
            "mask": spaces.Box(0.0, 1.0, (most,), np.float32),
        })  # fmt: skip
        self.action_space = spaces.Discrete(most)
        self._offered: Offered | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.decisions.restart()
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if not self.action_masks()[int(action)]:
            return self._observe(), WORST, True, False, {"legal": False}
        reward, over = self.decisions.take(int(action))
        return self._observe(), reward, over, False, {"legal": True}

    def action_masks(self) -> NDArray[np.bool_]:
        """Which options are legal now."""
        found = np.zeros(self.decisions.most_options, np.bool_)
        if self._offered is not None:
            found[: len(self._offered.legal)] = self._offered.legal
        return found

    def _observe(self) -> Observation:
        self._offered = offered = self.decisions.offered()
        rows, most = len(offered.legal), self.decisions.most_options
        options = np.zeros((most, self.decisions.option_size), np.float32)
        options[:rows] = offered.options
        return {
            "context": np.clip(offered.context, -LIMIT, LIMIT).astype(np.float32),
            "options": np.clip(options, -LIMIT, LIMIT),
            "mask": self.action_masks().astype(np.float32),
        }


class OperatorPartitionEnv(DecisionEnv):
    """Which dims of parameters the axes of a mesh split; see `Operators`."""

    def __init__(self, problem: Problem, model: ModelMesh, pruning: Pruning | None = None) -> None:
        super().__init__(Operators(problem, model, Judge(problem), pruning or Pruning()))


class DataParallelEnv(DecisionEnv):
    """Which dims of the inputs hold the batch; see `BatchDims`."""

    def __init__(self, graph: Graph, pruning: Pruning | None = None) -> None:
        super().__init__(BatchDims(graph, pruning or Pruning()))


class PipelinePartitionEnv(DecisionEnv):
    """Where the model is cut into stages, and how these run; see `Pipelines`."""

    def __init__(self, problem: Problem, pruning: Pruning | None = None) -> None:
        super().__init__(Pipelines(problem, Judge(problem), pruning or Pruning()))


IDS = {
    "meshwright/OperatorPartition-v0": OperatorPartitionEnv,
    "meshwright/DataParallel-v0": DataParallelEnv,
    "meshwright/PipelinePartition-v0": PipelinePartitionEnv,
}

for _id, _env in IDS.items():
    gymnasium.register(_id, entry_point=f"{__name__}:{_env.__name__}")
