"""Graphs kept in a folder from run to run: rows are of few models, and to trace one takes seconds.

A file is found by all that decides its graph: what was asked, the code that traces, torch and
transformers. Files are pickles of this benchmark's own, so that the folder has to be one's own.
"""

import hashlib
import os
import pickle
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import transformers

from benchmarks.published import model_kinds
from meshwright import ir
from meshwright.ir.graph.graph import Graph


def kept(folder: Path, asked: object, make: Callable[[], Graph]) -> Graph:
    """Returns the graph of what is `asked`, made only if the folder does not have it. `asked` has
    to print all that decides it."""
    key = hashlib.sha256(f"{_code()} {asked!r}".encode()).hexdigest()
    path = folder / f"{key}.pickle"
    if path.exists():
        graph = pickle.loads(path.read_bytes())
        assert isinstance(graph, Graph), path
        return graph
    graph = make()
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(graph))
    part.rename(path)
    return graph


_NO_GRAPH = ("presets", "styles")
"""Folders of `ir` that no graph comes from."""


@lru_cache
def _code() -> str:
    """A hash of the code that makes graphs."""
    assert ir.__file__ and model_kinds.__file__
    folder = Path(ir.__file__).parent
    sources = [Path(model_kinds.__file__), *folder.rglob("*.py")]
    sources = [x for x in sources if x.parent.name not in _NO_GRAPH]
    made = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for source in sorted(sources):
        made.update(source.read_bytes())
    return made.hexdigest()
