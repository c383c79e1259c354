"""The cheapest choice as an integer program, with a proven bound.

    x[n, s]     1 if node n is in state s              sum_s x[n, s] = 1
    z[e, p, q]  flow of an edge or a reader of a link  sum_q z[e, p, q] = x of the states behind p
                                                       sum_p z[e, p, q] = x of the states behind q
    y[v, p, t]  whether link v is moved from p to t    z[reader, p, t] <= y[v, p, t]

Only x is integer: with x fixed, z and y are too. States that an edge cannot tell apart share p.
Solver: HiGHS; `benchmarks/block_solvers.py` compares it with GSCIP and CP-SAT on these problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2  # type: ignore[import-untyped]
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]

from meshwright.ir.errors import MeshwrightError
from meshwright.planner.inside.choices import ValueEdge
from meshwright.planner.inside.eliminate import Reduced

Ints = NDArray[np.int64]
UNIT = 1e6
"""Picoseconds in the program's unit, so that its numbers are neither tiny nor huge."""


@dataclass(frozen=True, slots=True)
class Solver:
    """Which solver, and when it may stop."""

    kind: mathopt.SolverType = mathopt.SolverType.HIGHS
    gap: float = 1e-9
    """Relative: choices better by that may be missed."""
    node_limit: int | None = 2000
    """Branches, rather than seconds: equal problems have equal answers."""
    time_limit_s: float | None = None
    """For comparisons of solvers only."""


@dataclass(slots=True)
class _Program:
    """Variables and rows as growing arrays."""

    upper: list[Ints] = field(default_factory=list)
    count: int = 0
    costs: list[NDArray[np.float64]] = field(default_factory=list)
    integers: int = 0
    rows: list[Ints] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)
    lower: list[NDArray[np.float64]] = field(default_factory=list)
    above: list[NDArray[np.float64]] = field(default_factory=list)
    num_rows: int = 0

    def variables(self, costs: NDArray[np.float64]) -> int:
        """Adds variables in [0, 1]; the number of the first."""
        first, self.count = self.count, self.count + len(costs)
        self.costs.append(costs)
        return first

    def constraints(self, count: int, low: float, high: float) -> int:
        first, self.num_rows = self.num_rows, self.num_rows + count
        self.lower.append(np.full(count, low))
        self.above.append(np.full(count, high))
        return first

    def entries(self, rows: Ints, columns: Ints, value: float) -> None:
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(np.full(len(rows), value))

    def proto(self) -> model_pb2.ModelProto:
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(self.count))
        model.variables.lower_bounds.extend(np.zeros(self.count))
        model.variables.upper_bounds.extend(np.ones(self.count))
        model.variables.integers.extend([i < self.integers for i in range(self.count)])
        costs = np.concatenate(self.costs)
        used = np.flatnonzero(costs)
        model.objective.linear_coefficients.ids.extend(used.tolist())
        model.objective.linear_coefficients.values.extend(costs[used])
        model.linear_constraints.ids.extend(range(self.num_rows))
        model.linear_constraints.lower_bounds.extend(np.concatenate(self.lower))
        model.linear_constraints.upper_bounds.extend(np.concatenate(self.above))
        rows, columns = np.concatenate(self.rows), np.concatenate(self.columns)
        order = np.lexsort((columns, rows))
        model.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
        model.linear_constraint_matrix.column_ids.extend(columns[order].tolist())
        values = np.concatenate(self.values)[order]
        model.linear_constraint_matrix.coefficients.extend(values)
        return model


def solve_program(reduced: Reduced, solver: Solver) -> tuple[dict[int, int], float]:
    """States of what is left, and a bound in `UNIT`; without the offset."""
    program, first = _Program(), {}
    nodes = sorted(reduced.costs)
    for n in nodes:
        first[n] = program.variables(reduced.costs[n] / UNIT)
    program.integers = program.count
    for n in nodes:
        size = len(reduced.costs[n])
        row = program.constraints(1, 1.0, 1.0)
        program.entries(np.full(size, row), first[n] + np.arange(size), 1.0)
    for a in nodes:
        for b, table in sorted(reduced.edges[a].items()):
            if a < b:
                _edge(program, first[a], first[b], table)
    for link in reduced.links:
        _link(program, first, link)
    model = mathopt.Model.from_model_proto(program.proto())
    limit = None if solver.time_limit_s is None else timedelta(seconds=solver.time_limit_s)
    params = mathopt.SolveParameters(
        relative_gap_tolerance=solver.gap, node_limit=solver.node_limit, time_limit=limit
    )
    result = mathopt.solve(model, solver.kind, params=params)
    if not result.has_primal_feasible_solution():
        raise MeshwrightError(f"no layout was found: the solver says {result.termination.reason}")
    variables = {v.id: v for v in model.variables()}
    values = result.variable_values([variables[i] for i in range(program.integers)])
    left = {n: int(np.argmax(values[first[n] : first[n] + len(reduced.costs[n])])) for n in nodes}
    return left, result.termination.objective_bounds.dual_bound


def _edge(program: _Program, a: int, b: int, table: Ints) -> None:
    """Flows between the classes of states that the table tells apart."""
    left, rows = np.unique(table, axis=0, return_inverse=True)
    both, columns = np.unique(left, axis=1, return_inverse=True)
    z = program.variables(both.flatten() / UNIT)
    _flow(program, z, both.shape, a, rows.reshape(-1), b, columns.reshape(-1))


def _flow(
    program: _Program, z: int, shape: Sequence[int], a: int, rows: Ints, b: int, columns: Ints
) -> None:
    """Both sides of a flow are what the nodes chose."""
    p, q = shape
    cells = z + np.arange(p * q, dtype=np.int64).reshape(p, q)
    out = program.constraints(p, 0.0, 0.0)
    program.entries(np.repeat(out + np.arange(p), q), cells.flatten(), 1.0)
    program.entries(out + rows, a + np.arange(len(rows)), -1.0)
    into = program.constraints(q, 0.0, 0.0)
    program.entries(np.repeat(into + np.arange(q), p), cells.T.flatten(), 1.0)
    program.entries(into + columns, b + np.arange(len(columns)), -1.0)


def _link(program: _Program, first: dict[int, int], link: ValueEdge) -> None:
    made, rows = np.unique(link.made, return_inverse=True)
    targets = np.unique(np.concatenate([r.wants for r in link.readers]))
    price = link.price[np.ix_(made, targets)]
    y = program.variables(price.flatten() / UNIT)
    pays = price > 0
    for reader in link.readers:
        wanted, columns = np.unique(reader.wants, return_inverse=True)
        at = np.searchsorted(targets, wanted)
        z = program.variables(np.zeros(len(made) * len(wanted)))
        _flow(
            program, z, (len(made), len(wanted)), first[link.source], rows.reshape(-1),
            first[reader.node], columns.reshape(-1),
        )  # fmt: skip
        i, j = np.nonzero(pays[:, at])
        row = program.constraints(len(i), -np.inf, 0.0)
        program.entries(row + np.arange(len(i)), z + i * len(wanted) + j, 1.0)
        program.entries(row + np.arange(len(i)), y + i * len(targets) + at[j], -1.0)
