"""The best of all legal orders of a tiny task, tried one by one; knows nothing of the solver."""

from meshwright.planner.synthesis.task import Task

F, B, I, W = range(4)  # noqa: E741
Move = tuple[int, int, int]
"""Stage, kind, micro-batch."""


def best_s(task: Task) -> float:
    """Least makespan; infinite if memory admits no order. Micro-batches go in any order: they are
    numbered as the first stage begins with them."""
    return _Search(task).run()


class _Search:
    def __init__(self, task: Task) -> None:
        self.task, self.best = task, float("inf")
        self.last = len(task.stages) - 1
        self.ends: dict[Move, float] = {}
        self.free = list(task.release)
        self.held = [0] * task.num_ranks
        self.seen: set[tuple[object, ...]] = set()

    def run(self) -> float:
        self._branch(0.0)
        return self.best

    def _branch(self, now: float) -> None:
        done = sum(kind in (B, W) for _, kind, _ in self.ends)
        if done == (self.last + 1) * self.task.num_microbatches:
            self.best = min(self.best, max(self.free))
            return
        if self._bound() >= self.best - 1e-9:
            return
        key = (now, tuple(sorted(self.ends.items())))
        if key in self.seen:
            return
        self.seen.add(key)
        moves = []
        for stage in range(self.last + 1):
            for microbatch in range(self.task.num_microbatches):
                for kind in (F, B, I, W):
                    start = self._start((stage, kind, microbatch))
                    if start is not None and start >= now:
                        moves.append((start, (stage, kind, microbatch)))
        for start, move in sorted(moves):
            self._with(start, move)

    def _bound(self) -> float:
        """Work that is left on each rank."""
        left = list(self.free)
        for stage, rank in enumerate(self.task.placement):
            f, b, i, w = self.task.seconds[stage]
            for m in range(self.task.num_microbatches):
                left[rank] += f if (stage, F, m) not in self.ends else 0.0
                if (stage, I, m) in self.ends:
                    left[rank] += w if (stage, W, m) not in self.ends else 0.0
                elif (stage, B, m) not in self.ends:
                    left[rank] += min(b, i + w)
        return max(left)

    def _start(self, move: Move) -> float | None:
        """When it would start, or None if it may not be next on its rank."""
        stage, kind, m = move
        done = self.ends
        if move in done or (kind in (B, I) and ((stage, B, m) in done or (stage, I, m) in done)):
            return None
        needs: list[float | None] = []
        if kind == F and not stage and m:
            needs.append(done.get((0, F, m - 1)))
        if kind == F and stage:
            needs.append(self._sent(done.get((stage - 1, F, m)), stage - 1))
        if kind in (B, I):
            needs.append(done.get((stage, F, m)))
            if stage < self.last:
                gradient = done.get((stage + 1, I, m), done.get((stage + 1, B, m)))
                needs.append(self._sent(gradient, stage))
        if kind == W:
            needs.append(done.get((stage, I, m)))
        rank = self.task.placement[stage]
        if any(n is None for n in needs) or not self._fits(rank, move):
            return None
        return max([self.free[rank], *(n for n in needs if n is not None)])

    def _sent(self, end: float | None, border: int) -> float | None:
        return None if end is None else end + self.task.sends_s[border]

    def _bytes(self, move: Move) -> tuple[int, int]:
        """Held from its start, and freed at its end."""
        stage, kind, _ = move
        saved, halved = self.task.stages[stage].saved_bytes, self.task.halved[stage]
        return {F: (saved, 0), B: (0, saved), I: (halved, 0), W: (0, saved + halved)}[kind]

    def _fits(self, rank: int, move: Move) -> bool:
        return self.held[rank] + self._bytes(move)[0] <= self.task.capacity[rank]

    def _with(self, start: float, move: Move) -> None:
        stage, kind, _ = move
        rank, (taken, freed) = self.task.placement[stage], self._bytes(move)
        before = self.free[rank]
        self.free[rank] = self.ends[move] = start + self.task.seconds[stage][kind]
        self.held[rank] += taken - freed
        self._branch(start)
        self.held[rank] -= taken - freed
        self.free[rank] = before
        del self.ends[move]
