"""Loops over the rows of a matrix that solve a triangular system are done by one operator.

The delta rule of linear attention is often written so: each row of a square matrix, below its
diagonal, becomes itself plus what it makes of the rows above, which have had their turn. That is
`x = L + L x` for the part L below the diagonal, if nothing is above; as a loop it is ten operators
for each of 64 rows of each layer. Such a loop is known by what it computes: it is run on matrices
of its size, and must agree with the system. All that its lines may ask of tensors is in `_OF_ROWS`,
so that equal values have equal gradients.
"""

import ast
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.torch_private import no_modes
from meshwright.ir.trace.loops import SeenLoop

_OF_ROWS = frozenset(
    "T add bmm clone contiguous matmul mT mm mul neg squeeze sub sum transpose unsqueeze".split()
)
"""What a loop may ask of a tensor: nothing that tells of its size or kind."""
_EXACT = 1e-10
"""How far the loop and the system may be apart, relative to the largest value."""
_SIGNS = ((1, 1), (-1, -1), (1, -1), (-1, 1))
"""Of L and of L x, in `x = L + L x`."""
_ROWS = "rows of the loop"
"""No name that code can have."""
_TYPES = (torch.float32, torch.float64)


def solve_rows(loop: SeenLoop) -> bool:
    """Do a loop over the rows of a matrix that is a triangular system; whether it is one."""
    name = _only_matrix(loop)
    matrix = loop.values.get(name)
    if not isinstance(matrix, Tensor) or matrix.ndim < 2 or matrix.dtype not in _TYPES:
        return False
    size = matrix.shape[-1]
    if matrix.shape[-2] != size or loop.over[-1] != size - 1 or loop.over[0] > 1:
        return False
    signs = _signs(loop, name, matrix.ndim, size)
    if signs is None:
        return False
    matrix.copy_(_solved(matrix, *signs))
    return True


def _solved(matrix: Tensor, of_row: int, of_product: int) -> Tensor:
    """The matrix with the solution below its diagonal; what else it has stays, and rows below
    multiply it, too: each has its turn on the whole square before it."""
    lower, rest = matrix.tril(-1), matrix.triu()
    right = _signed(lower, of_row) + _signed(lower @ rest, of_product).tril(-1)
    system = _signed(matrix, -of_product)
    found: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return rest + found


def _signed(x: Tensor, sign: int) -> Tensor:
    return x if sign > 0 else -x


# What a loop reads and writes ---------------------------------------------------------------------


def _only_matrix(loop: SeenLoop) -> str:
    """The one name from outside that the body reads, writes parts of and leaves something in; ""
    if it does anything else."""
    statement = loop.statement
    if statement.orelse or not isinstance(statement.target, ast.Name):
        return ""
    made, written = {statement.target.id}, set[str]()
    for line in statement.body:
        if not isinstance(line, ast.Assign | ast.AugAssign):
            return ""
        targets = line.targets if isinstance(line, ast.Assign) else [line.target]
        if len(targets) != 1 or not all(map(_is_plain, ast.walk(line))):
            return ""
        (target,) = targets
        if isinstance(target, ast.Name) and isinstance(line, ast.Assign):
            read, new = _read(line.value), {target.id}
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            read, new = _read(line.value) | _read(target.slice), set[str]()
            written.add(target.value.id)
        else:
            return ""
        outside = {x for x in read - made if not isinstance(loop.names.get(x), ModuleType)}
        written |= outside & loop.values.keys()
        if outside - written:
            return ""
        made |= new
    if len(written) != 1 or written & made or loop.read_after(made):
        return ""
    return written.pop()


_PLAIN = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.Constant, ast.UnaryOp,
    ast.BinOp, ast.Call, ast.keyword, ast.Assign, ast.AugAssign, ast.operator, ast.unaryop,
    ast.expr_context,
)  # fmt: skip


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _OF_ROWS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute)
    return isinstance(node, _PLAIN)


def _read(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


# What a loop computes -----------------------------------------------------------------------------

_KNOWN: dict[tuple[CodeType, int, int, int, range], tuple[int, int] | None] = {}


def _signs(loop: SeenLoop, name: str, rank: int, size: int) -> tuple[int, int] | None:
    """Which system it is that the loop solves, if any."""
    key = (loop.code, loop.statement.lineno, rank, size, loop.over)
    if key not in _KNOWN:
        with no_modes(), torch.device("cpu"), torch.no_grad():
            _KNOWN[key] = _tried(_as_function(loop, name), rank, size)
    return _KNOWN[key]


def _as_function(loop: SeenLoop, name: str) -> Callable[[Tensor], Tensor]:
    """The loop alone, on a matrix of one's own."""
    rows = ast.Call(ast.Name(_ROWS, ast.Load()), [], [])
    alone = ast.For(loop.statement.target, rows, loop.statement.body, [])
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(alone, loop.statement)], []))
    code = compile(module, loop.code.co_filename, "exec")

    def run(matrix: Tensor) -> Tensor:
        values: dict[str, Any] = {name: matrix.clone(), _ROWS: lambda: loop.over}
        exec(code, dict(loop.names), values)
        made: Tensor = values[name]
        return made

    return run


def _tried(run: Callable[[Tensor], Tensor], rank: int, size: int) -> tuple[int, int] | None:
    probes = list(_probes(rank, size))
    try:
        wanted = list(map(run, probes))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NameError):
        return None
    for signs in _SIGNS:
        found = (_solved(probe, *signs) for probe in probes)
        if all(map(_close, found, wanted)):
            return signs
    return None


def _probes(rank: int, size: int) -> Iterator[Tensor]:
    """Full matrices, the same every time: one of all products of few rows, one of those of all."""
    generator = torch.Generator().manual_seed(0)
    shape = (2,) * (rank - 2) + (size, size)
    drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
    yield drawn * (1.5 / size**0.5)
    signs = torch.where(drawn > 0, 1.0, -1.0) + 0.01 * drawn
    steps = drawn.new_ones(size - 1).diag(-1)
    yield signs * steps + drawn.triu()


def _close(found: Tensor, wanted: Tensor) -> bool:
    apart, largest = (found - wanted).abs().max(), wanted.abs().max()
    return bool(apart <= _EXACT * largest.clamp_min(1.0))
