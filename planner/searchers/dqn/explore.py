"""The search of the `dqn` searcher: agents first, small steps after them, then what is left."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.across.mesh_variants import MeshVariant, ways
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.bounds.frames import Frame, frames
from meshwright.planner.bounds.relaxation import Relaxation
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import Choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import add_way
from meshwright.planner.search.offers import TIE, Offer
from meshwright.planner.searchers.dqn.decisions import Pruning
from meshwright.planner.searchers.dqn.envs import DecisionEnv
from meshwright.planner.searchers.dqn.fit import tried
from meshwright.planner.searchers.dqn.flips import best_of, flipped
from meshwright.planner.searchers.dqn.improve import Improver, starts
from meshwright.planner.searchers.dqn.judge import Judge
from meshwright.planner.searchers.dqn.operators import Operators
from meshwright.planner.searchers.dqn.pipelines import Pipelines
from meshwright.planner.searchers.dqn.training import Settings, Trainer
from meshwright.planner.searchers.dqn.weights import card_of, load_agent
from meshwright.planner.searchers.exhaustive import count

SMALL = 12_000
"""Choices up to which all are gone through in the end, or proven to be no better."""
STEPS, FEWEST = 3000, 128
"""Decisions of the pipeline agent, and in small spaces."""
CHUNK = 64
"""Decisions between two looks at the clock."""
WORK = 150_000
"""What simulations of the agent may take: about the blocks, devices and actions in all of them."""
SURE = 1.002
"""Bounds must exceed the best step by so much: simulated steps are rounded, and exact to 0.1 %."""
GROUP_STEPS, MESHES = 24, 2
"""Decisions of the operator agent per group, and meshes that it is set on."""
FLIPS = 80
"""Partitions that are tried around what the operator agent has found: by groups of linked dims, and
then by single dims, as layouts may also change between ops."""
HOPEFUL = 1.25
"""Meshes of plans that take so many times the best are worth an operator agent."""
POLISHED, IMPROVING = 8, 200_000
"""Plans that are improved, and the work spent on that."""
SHIPPED = Path(__file__).parent / "agents" / "pipelines"


def warm(settings: Settings) -> Settings:
    """For an agent that has learnt elsewhere: it acts at once, explores little, learns slowly."""
    return replace(settings, explore=0.2, starts=1, learning_rate=3e-4)


class Explorer:
    """Of one problem."""

    def __init__(self, problem: Problem, *, shipped: bool = True, steps: int = STEPS) -> None:
        self.problem, self.judge = problem, Judge(problem)
        self.space = count(problem, SMALL)
        self.shipped = shipped and SHIPPED.with_suffix(".json").exists()
        self.steps = steps if self.space > SMALL else min(steps, max(FEWEST, self.space // 4))
        self.timed = problem.objective != "memory"
        self.bound_s, self.bounds = 0.0, dict[Frame, float]()
        self.decisions: Pipelines | None = None

    def run(self) -> Iterator[Offer]:
        yield self._bound()
        yield from self._pipelines()
        yield from self._polish(IMPROVING)
        if self.space > SMALL:
            yield from self._operators()
        if self.space <= SMALL:
            yield from self._rest()
            yield Offer(candidates=0, open_s=float("inf"))
        else:
            yield Offer(candidates=0, open_s=self.bound_s)

    def _bound(self) -> Offer:
        choices = ChoiceSpace(self.problem)
        relaxed = Relaxation(RunCosts(self.problem), choices.places)
        self.bounds = {frame: relaxed.bound(frame).seconds for frame in frames(self.problem)}
        least = min(self.bounds.values(), default=np.inf)
        self.bound_s = float(least) if np.isfinite(least) else 0.0
        return Offer(candidates=0, bound_s=self.bound_s)

    def _fresh(self) -> Iterator[Offer]:
        for plan in self.judge.drained():
            yield Offer(plan=plan)

    # Agents ---------------------------------------------------------------------------------------

    def _pipelines(self) -> Iterator[Offer]:
        """Learns until steps or work are spent."""
        usual = self.problem.objective in ("throughput", "batch") and self.bound_s
        reference = self.bound_s if usual else self._first_value()
        self.decisions = Pipelines(self.problem, self.judge, Pruning(), reference)
        yield from self._fresh()
        trainer = self._trainer(self.decisions)
        try:
            while trainer.done < self.steps and self.judge.work < WORK:
                trainer.learn(CHUNK)
                yield from self._fresh()
        finally:
            trainer.close()

    def _trainer(self, decisions: Pipelines) -> Trainer:
        settings = Settings(self.steps)
        if self.shipped:
            settings = warm(settings)
        trainer = Trainer(DecisionEnv(decisions), settings, self.problem.seed, self.problem.log_dir)
        if self.shipped:
            load_agent(trainer.agent, card_of(decisions, trainer.agent), SHIPPED)
        return trainer

    def _first_value(self) -> float:
        """What the first choice of all has."""
        choices = ChoiceSpace(self.problem)
        for frame in frames(self.problem):
            for choice in choices.of(frame):
                return max(self.judge(choice).value, 1e-12)
        return 1.0

    def _operators(self) -> Iterator[Offer]:
        """Layouts of the meshes of good plans that are better than those there were."""
        added = False
        for model in self._models():
            agent = Operators(self.problem, model, self.judge, Pruning(), self._base(model))
            steps = GROUP_STEPS * len(agent.linkage.groups)
            trainer = Trainer(DecisionEnv(agent), Settings(steps, starts=16), self.problem.seed)
            while trainer.done < steps:
                trainer.learn(min(CHUNK, steps))
                yield from self._fresh()
            for _ in flipped(agent, len(agent.found) + FLIPS):
                yield from self._fresh()
            single = agent.unlinked()
            for _ in flipped(single, FLIPS):
                yield from self._fresh()
            best = min(best_of(agent), best_of(single), key=lambda found: found.verdict)
            if best.verdict < agent.known(ways(self.problem)):
                added = True
                add_way(self.problem, MeshVariant(model, best.variant))
                yield from self._with(MeshVariant(model, best.variant))
        if added:
            yield from self._polish(IMPROVING / 2)
            yield self._bound()

    def _models(self) -> list[ModelMesh]:
        """Model meshes of the best plans."""
        ranked = sorted(self.judge.seen.items(), key=lambda item: item[1])
        hopeful = [c for c, v in ranked if v.fits and v.value <= HOPEFUL * ranked[0][1].value]
        models = dict.fromkeys(stage.model for c in hopeful for stage in c.stages if stage.model)
        return list(models)[:MESHES]

    def _base(self, model: ModelMesh) -> Choice:
        """The best plan with that mesh."""
        ranked = sorted(self.judge.seen.items(), key=lambda item: item[1])
        return next(c for c, _ in ranked if any(s.model == model for s in c.stages))

    def _with(self, way: MeshVariant) -> Iterator[Offer]:
        """The best plans on that mesh, with its new layouts."""
        ranked = sorted(self.judge.seen.items(), key=lambda item: item[1])
        held = [c for c, _ in ranked if any(s.model == way.model for s in c.stages)]
        for choice in held[:POLISHED]:
            self.judge(replace(choice, stages=tuple(
                replace(s, variant=way.variant) if s.model == way.model else s
                for s in choice.stages
            )))  # fmt: skip
        yield from self._fresh()

    # Around what they found -----------------------------------------------------------------------

    def _polish(self, work: float) -> Iterator[Offer]:
        """Moves from the best choices of several families to better neighbours, in rounds as long
        as some family was cut short by its share of the work."""
        left, is_cut = work, True
        while is_cut and left > 0:
            is_cut, firsts = False, starts(self.judge, POLISHED)
            for number, (choice, _) in enumerate(firsts):
                before, share = self.judge.work, left / (len(firsts) - number)
                for _ in self._climb(choice):
                    yield from self._fresh()
                    if self.judge.work - before > share:
                        is_cut = True
                        break
                left -= self.judge.work - before
        yield from self._fresh()

    def _climb(self, choice: Choice) -> Iterator[Choice]:
        assert self.decisions
        sketches = self.decisions.sketches
        best = min(tried(self.judge, sketches, choice), key=self.judge)
        improver = Improver(self.judge, sketches, self._is_hopeless, self.timed)
        yield from improver.climb(best, self.judge(best))

    def _is_hopeless(self, choice: Choice) -> bool:
        assert self.decisions
        return self._is_slower(self.decisions.sketches.leaf.seconds(obey(self.problem, choice)))

    def _is_slower(self, bound_s: float) -> bool:
        """Whether what takes at least so long is slower than the best, and no tie."""
        best = self.judge.best
        usual = self.problem.objective in ("throughput", "batch")
        return bool(usual and best and best[0].fits and bound_s > best[0].value * (1 + TIE) * SURE)

    def _rest(self) -> Iterator[Offer]:
        """All choices of a small space that may be better."""
        choices, pruned = ChoiceSpace(self.problem), 0
        for frame, bound_s in self.bounds.items():
            if self._is_slower(bound_s):
                pruned += 1
                continue
            for choice in choices.of(frame):
                if choice in self.judge.seen:
                    continue
                if self._is_hopeless(choice):
                    pruned += 1
                    continue
                self.judge(choice)
                yield from self._fresh()
        yield Offer(candidates=0, pruned={"bound": pruned})
