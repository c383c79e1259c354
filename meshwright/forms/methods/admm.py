"""Training of a recurrent network by alternating directions (P-ADMMiRNN, Tang et al. 2020).

The net is unrolled: a_t = U x_t + W s_(t-1) + b, s_t = tanh(a_t), o = V s_T + c, the loss is of o.
These equations are held by penalties, those of the last moment by multipliers too. An iteration
goes through o, (V, c), then s and a from last to first, (U, W, b), and back the same way; then
multipliers are changed. Each part is made smaller or kept with all others as they are, so only
the last can raise the augmented Lagrangian. There is no backward pass.

Other than the paper, matrices are not stepped by a linearised problem: their problem is quadratic,
and is solved with a proximal term, from sums over samples (of products of what is read with itself
and with what is wanted). Ranks have different samples and sum these alone: with `stale=0` that is
what one process does, to rounding. With `stale` more they are that many iterations old, and are
summed while ranks go on: it converges, to other numbers.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.forms.methods import Awaited, SummedTerms, Summing
from meshwright.forms.recurrent import check_forward, recurrent_of
from meshwright.forms.settings import FormSettings, Number, wrong_settings
from meshwright.ir.plan.plan import Plan, Setting

SETTINGS = {
    "penalty": Number(1e5, 1e-9, 1e9),
    "last_penalty": Number(10.0, 1e-9, 1e9),
    "proximal": Number(1e-3, 0.0, 1e9),
    "dual_step": Number(0.1, 0.0, 1.0),
    "stale": Number(0, 0, 8),
}
"""`penalty`: of the equations before the last moment; `last_penalty`: of the last ones;
`proximal`: of how far matrices go; `dual_step`: of multipliers, in penalties; `stale`: iterations
that sums are old."""
CHANGES = "trains by alternating directions on all samples at once, without gradients"
_OUTPUT_STEPS, _NEWTON_STEPS = 10, 5
Terms = tuple[Tensor, Tensor]
"""Sums over samples of z z' and of w z', for the matrix that brings z next to w."""


def check(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a plan of it, and what would be right."""
    assert plan.method is not None
    yield from wrong_settings("admm", SETTINGS, plan.method.settings)
    if plan.precision != "fp64":
        yield (
            f"penalties of admm differ by orders of magnitude, and precision is {plan.precision}",
            "precision fp64",
        )
    if len(plan.stages) > 1:
        yield f"admm splits samples alone, and there are {len(plan.stages)} stages", "pp 1"
    for stage in plan.stages[:1]:
        if stage.model:
            axis, size = stage.model[0]
            yield f"admm splits samples alone, and {axis} is {size}", f"{axis} 1"
        if stage.is_sharded or stage.sync or stage.store or stage.by_parameter:
            yield (
                "ranks have all parameters under admm, and no optimizer",
                "zero 0 and nothing else",
            )
    if plan.num_microbatches > 1:
        yield f"admm has all samples at once, not {plan.num_microbatches} micro-batches", "1"


def describe(
    model: nn.Module, settings: Mapping[str, Setting] = MappingProxyType({})
) -> tuple[SummedTerms, ...]:
    """Returns what ranks sum in one iteration: each matrix is found twice; upper halves of products
    of what it reads go, and its own shape."""
    net = recurrent_of(model)
    (hidden, reads), classes = net.w_in.shape, net.w_out.shape[0]
    return (
        SummedTerms("of V and c", _packed(hidden + 1, classes), 2),
        SummedTerms("of U, W and b", _packed(reads + hidden + 1, hidden), 2),
        SummedTerms("the Lagrangian", 1, 1),
    )


def _packed(columns: int, rows: int) -> int:
    return columns * (columns + 1) // 2 + rows * columns


def build(model: nn.Module, settings: Mapping[str, Setting], sums: Summing) -> "Alternating":
    """Returns what runs it. PlanError if the model is not a recurrent layer and a linear one."""
    return Alternating(model, FormSettings(SETTINGS, settings), sums)


class Alternating:
    """One rank's samples [n, moments, reads], in float64, and parameters that all ranks have."""

    def __init__(self, model: nn.Module, settings: FormSettings, sums: Summing) -> None:
        self.net, self._model, self._sum = recurrent_of(model), model, sums
        self._before, self._last = settings.number("penalty"), settings.number("last_penalty")
        self._near, self._dual = settings.number("proximal"), settings.number("dual_step")
        self._stale = settings.whole("stale")
        self._waiting: dict[str, deque[tuple[Tensor, Awaited | None]]] = {}
        """Sums under way or old ones, by what they are of, oldest first."""

    def begin(self, samples: Sequence[Tensor], total: int) -> None:
        """Starts where the network is: all equations hold, and multipliers are 0."""
        check_forward(self.net, self._model, samples[0])
        self.x, self.y = samples[0].double(), samples[1]
        self._total, moments = total, samples[0].shape[1]
        self._wanted = F.one_hot(self.y, self.net.w_out.shape[0]).double()
        state = self.x.new_zeros(len(self.x), self.net.w_rec.shape[0])
        found_a, found_s = [], []
        for t in range(moments):
            found_a.append(self._reached(t, state))
            found_s.append(state := torch.tanh(found_a[-1]))
        self.a, self.s = torch.stack(found_a, 1), torch.stack(found_s, 1)
        self.o = self._read_out()
        self.duals = [torch.zeros_like(state), torch.zeros_like(state), torch.zeros_like(self.o)]
        self._weights = [self._before] * (moments - 1) + [self._last]

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """Parameters, and sums that wait."""
        found = dict(self.net.named())
        for name, waiting in self._waiting.items():
            for index, (flat, work) in enumerate(waiting):
                if work is not None:
                    work.wait()
                    waiting[index] = flat, None
                found[f"waiting/{name}/{index}"] = flat
        return found

    @property
    def of_samples(self) -> Mapping[str, Tensor]:
        """The parts of each sample, and its multipliers."""
        last = {f"dual{n}": x for n, x in enumerate(self.duals)}
        return {"a": self.a, "s": self.s, "o": self.o, **last}

    def load(self, shared: Mapping[str, Tensor]) -> None:
        """Takes parameters and sums that wait."""
        self.net.take(shared)
        self._waiting.clear()
        for key in sorted(shared):
            if key.startswith("waiting/"):
                _, name, _ = key.split("/")
                self._waiting.setdefault(name, deque()).append((shared[key], None))

    @torch.no_grad()
    def step(self) -> Tensor:
        """Takes one iteration; returns the augmented Lagrangian, a mean over all samples."""
        moments = range(self.x.shape[1])
        self._find_output()
        self._find_head("head_back")
        for t in reversed(moments):
            self._find_state(t)
            self._find_sum(t)
        self._find_recurrence("layer_back")
        self._find_recurrence("layer_forth")
        for t in moments:
            self._find_sum(t)
            self._find_state(t)
        self._find_head("head_forth")
        self._find_output()
        for dual, gap in zip(self.duals, self._gaps(), strict=True):
            dual.add_(gap, alpha=self._dual * self._last)
        value = self.lagrangian()
        self._sum(value).wait()
        return value

    def lagrangian(self) -> Tensor:
        """Returns this rank's part of it."""
        value = F.cross_entropy(self.o, self.y, reduction="sum")
        for t, weight in enumerate(self._weights):
            first = self.a[:, t] - self._reached(t, self._before_of(t))
            second = self.s[:, t] - torch.tanh(self.a[:, t])
            value = value + weight / 2 * (first.square().sum() + second.square().sum())
        gaps = self._gaps()
        value = value + self._last / 2 * gaps[2].square().sum()
        for dual, gap in zip(self.duals, gaps, strict=True):
            value = value + (dual * gap).sum()
        return (value / self._total).reshape(1)

    def _gaps(self) -> tuple[Tensor, Tensor, Tensor]:
        """How far the equations of the last moment are from holding."""
        t = self.x.shape[1] - 1
        return (
            self.a[:, t] - self._reached(t, self._before_of(t)),
            self.s[:, t] - torch.tanh(self.a[:, t]),
            self.o - self._read_out(),
        )

    def _before_of(self, t: int) -> Tensor:
        return self.s[:, t - 1] if t else torch.zeros_like(self.s[:, 0])

    def _reached(self, t: int, state: Tensor) -> Tensor:
        net = self.net
        return self.x[:, t] @ net.w_in.T + state @ net.w_rec.T + net.b_rec

    def _read_out(self) -> Tensor:
        return self.s[:, -1] @ self.net.w_out.T + self.net.b_out

    def _find_output(self) -> None:
        """Newton's steps with a bound of the curvature of cross-entropy (Böhning 1992), which
        never raise it."""
        goal, classes = self._read_out() - self.duals[2] / self._last, self.o.shape[1]
        bound = 0.5 + self._last
        for _ in range(_OUTPUT_STEPS):
            slope = torch.softmax(self.o, 1) - self._wanted + self._last * (self.o - goal)
            shared = slope.sum(1, keepdim=True) * (0.5 / classes / (bound - 0.5))
            self.o -= (slope + shared) / bound

    def _find_state(self, t: int) -> None:
        """A quadratic problem of one matrix for all samples."""
        net, weight, held = self.net, self._weights[t], torch.tanh(self.a[:, t])
        here = torch.eye(net.w_rec.shape[0], dtype=self.x.dtype) * weight
        if t + 1 == len(self._weights):
            left = here + self._last * net.w_out.T @ net.w_out
            back = self._last * (self.o - net.b_out) + self.duals[2]
            right = weight * held - self.duals[1] + back @ net.w_out
        else:
            after = self._weights[t + 1]
            left = here + after * net.w_rec.T @ net.w_rec
            back = after * (self.a[:, t + 1] - self.x[:, t + 1] @ net.w_in.T - net.b_rec)
            if t + 2 == len(self._weights):
                back = back + self.duals[0]
            right = weight * held + back @ net.w_rec
        self.s[:, t] = torch.cholesky_solve(right.T, torch.linalg.cholesky(left)).T

    def _find_sum(self, t: int) -> None:
        """A problem of each number by itself, by Newton's steps that make it smaller."""
        weight, last = self._weights[t], t + 1 == len(self._weights)
        goal, held = self._reached(t, self._before_of(t)), self.s[:, t]
        if last:
            goal, held = goal - self.duals[0] / weight, held + self.duals[1] / weight
        a = self.a[:, t].clone()
        best = (a - goal).square() + (held - torch.tanh(a)).square()
        for _ in range(_NEWTON_STEPS):
            bent = torch.tanh(a)
            steep = 1 - bent.square()
            slope = a - goal - (held - bent) * steep
            least = 1 + steep.square()
            tried = a - slope / torch.maximum(least + 2 * (held - bent) * bent * steep, least)
            value = (tried - goal).square() + (held - torch.tanh(tried)).square()
            better = value < best
            a, best = torch.where(better, tried, a), torch.where(better, value, best)
        self.a[:, t] = a

    def _find_head(self, name: str) -> None:
        goal = self.o + self.duals[2] / self._last
        found = self._fitted(name, [(self._last, [self.s[:, -1]], goal)], self.net.head)
        self.net.head = found

    def _find_recurrence(self, name: str) -> None:
        rows = []
        for t, weight in enumerate(self._weights):
            goal = self.a[:, t]
            if t + 1 == len(self._weights):
                goal = goal + self.duals[0] / weight
            rows.append((weight, [self.x[:, t], self._before_of(t)], goal))
        self.net.layer = self._fitted(name, rows, self.net.layer)

    def _fitted(
        self, name: str, rows: Sequence[tuple[float, list[Tensor], Tensor]], now: Tensor
    ) -> Tensor:
        """The matrix [wanted, read + 1] that fits what is wanted, near to what it was."""
        products, fits = torch.zeros(()), torch.zeros(())
        for weight, reads, goal in rows:
            read = torch.cat([*reads, torch.ones_like(goal[:, :1])], 1)
            products = products + weight / self._total * read.T @ read
            fits = fits + weight / self._total * goal.T @ read
        products, fits = self._summed(name, products, fits)
        near = self._near * torch.eye(len(products), dtype=now.dtype)
        factor = torch.linalg.cholesky(products + near)
        return torch.cholesky_solve((fits + self._near * now).T, factor).T

    def _summed(self, name: str, products: Tensor, fits: Tensor) -> Terms:
        """Over all ranks; those of the iteration `stale` before this one, or of the first."""
        upper = torch.triu_indices(len(products), len(products))
        flat = torch.cat([products[upper[0], upper[1]], fits.flatten()])
        waiting = self._waiting.setdefault(name, deque())
        waiting.append((flat, self._sum(flat)))
        flat, work = waiting[0]
        if work is not None:
            work.wait()
            waiting[0] = flat, None
        if len(waiting) > self._stale:
            waiting.popleft()
        made = torch.zeros_like(products)
        made[upper[0], upper[1]] = flat[: upper.shape[1]]
        return made + made.triu(1).T, flat[upper.shape[1] :].view_as(fits)
