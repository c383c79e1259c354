"""Which solver finds the layouts of blocks: HiGHS, SCIP and CP-SAT on the program, and our own way.

python -m benchmarks.block_solvers [-o docs/results/block_solvers.md] [--seconds 60]

The problems are those of the planner: all patterns of a model on a mesh. Each solver gets the
integer program after exact elimination (`planner.inside.eliminate`). `planner` is what the planner
does: dual ascent first, then the program for what is left open (`planner.inside.choose`).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import perf_counter

import torch
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ModelMesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.choice_ilp import UNIT, Solver, solve_program
from meshwright.planner.inside.choices import BlockProblem, cost_of
from meshwright.planner.inside.choose import choose
from meshwright.planner.inside.data_layout import solve_data
from meshwright.planner.inside.eliminate import reduce
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.mesh_problem import mesh_problem
from meshwright.planner.inside.mesh_space import mesh_space
from meshwright.planner.inside.moves import Moves
from meshwright.planner.inside.prices import AlphaBeta

MESHES: tuple[ModelMesh, ...] = (
    (("tp", 8),),
    (("cp", 2), ("tp", 4)),
    (("tp_row", 4), ("tp_col", 8)),
    (("tp_depth", 2), ("tp_row", 2), ("tp_col", 2)),
)
SOLVERS = {
    "HiGHS": mathopt.SolverType.HIGHS,
    "SCIP": mathopt.SolverType.GSCIP,
    "CP-SAT": mathopt.SolverType.CP_SAT,
}
LARGEST = 2000
"""States up to which a program goes to a solver as a whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one solver."""

    problem: str
    states: int
    solver: str
    seconds: float
    cost: int
    bound: int

    def text(self) -> str:
        gap = f"{1 - self.bound / self.cost:.1e}" if self.cost else "-"
        found = f"{self.cost / 1e12:.6g} s" if self.cost else "none"
        return (
            f"| {self.problem} | {self.states} | {self.solver} | {self.seconds:.2f} | {found} | "
            f"{gap} |"
        )


def models() -> dict[str, Graph]:
    """Without weights; a few layers, as equal ones are one pattern."""
    gpt2 = GPT2Config(n_embd=1600, n_layer=3, n_head=25, use_cache=False, loss_type="ForCausalLM")
    llama = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=3,
        num_attention_heads=64, num_key_value_heads=8, use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    with torch.device("meta"):
        made = {"GPT-2-XL": GPT2LMHeadModel(gpt2), "Llama-3-70B": LlamaForCausalLM(llama)}
    lengths = {"GPT-2-XL": 1024, "Llama-3-70B": 4096}
    found = {}
    for name, model in made.items():
        tokens = torch.zeros(8, lengths[name], dtype=torch.int64)
        found[name] = trace(model, {"input_ids": tokens, "labels": tokens})
    return found


def problems() -> Iterator[tuple[str, BlockProblem]]:
    """At prices where splitting borders pays."""
    for name, graph in models().items():
        data = solve_data(graph)
        for mesh in MESHES:
            moves = Moves(tuple(size for _, size in mesh))
            space = mesh_space(graph, data, mesh)
            problem = mesh_problem(graph, space, moves, split_borders=True)
            axes = " x ".join(f"{axis} {size}" for axis, size in mesh)
            choices = problem.choices(usual(mesh, AlphaBeta(half_reduce=1.0)))
            yield f"{name}, {axes}", choices


def runs(name: str, choices: BlockProblem, limit_s: float) -> Iterator[Row]:
    """Every solver on one problem."""
    reduced = reduce(choices)
    states = sum(len(costs) for costs in reduced.costs.values())
    start = perf_counter()
    chosen = choose(choices)
    yield Row(name, states, "planner", perf_counter() - start, chosen.cost, chosen.bound)
    for solver, kind in SOLVERS.items() if states <= LARGEST else ():
        start = perf_counter()
        cost = bound = 0
        try:
            asked = Solver(kind, gap=1e-6, node_limit=None, time_limit_s=limit_s)
            left, proven = solve_program(reduced, asked)
            cost = cost_of(choices, reduced.states(left))
            bound = int(proven * UNIT) + reduced.offset
        except MeshwrightError:
            pass  # nothing found in time: an empty row
        yield Row(name, states, solver, perf_counter() - start, cost, bound)


_TEXT = """# Solvers of layouts

{day}, `python -m benchmarks.block_solvers --seconds {limit:.0f}`, 2-core CPU machine that others
used as well, one run each. Costs are those of one micro-batch with one sample at the planner's
usual prices; `gap` is to the solver's own bound. Programs of more than {largest} states went to
the planner alone.

| problem | states | solver | seconds | cost | gap |
|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of a solver")
    options = parser.parse_args()
    lines = []
    for name, choices in problems():
        for row in runs(name, choices, options.seconds):
            lines.append(row.text())
            print(lines[-1], flush=True)
    text = (
        _TEXT.format(day=date.today(), limit=options.seconds, largest=LARGEST)
        + "\n".join(lines)
        + "\n"
    )
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
