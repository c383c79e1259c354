"""The newest state in the memory of nodes is read from whoever still has it, or refused."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from meshwright.runtime.checkpoint import manifest
from meshwright.runtime.checkpoint.files import DamagedError
from meshwright.runtime.checkpoint.manifest import Manifest, PartFile, StoredPiece, StoredTensor
from meshwright.runtime.checkpoint.node_memory import KeptSave, NodeMemory
from meshwright.runtime.checkpoint.remembered import Remembered, newest

HERE = Path("memory")


def _part(rank, rows=2, step=4, dtype="float32"):
    """Of two ranks, each with two rows of four."""
    file, size = f"part-{rank:05d}.safetensors", {"float32": 4, "float64": 8}[dtype]
    piece = StoredPiece((2 * rank, 0), (rows, 3), file, 8, rows * 3 * size, 0)
    kept = {"w": StoredTensor(dtype, (4, 3), (piece,))}
    return Manifest(step, "model", rank, rank, {file: PartFile(8 + piece.nbytes, 8, 0)}, kept)


def test_parts_of_ranks_make_a_whole_or_are_refused():
    whole = manifest.joined([_part(0), _part(1)], HERE)
    assert [piece.offsets for piece in whole.tensors["w"].pieces] == [(0, 0), (2, 0)]
    assert len(whole.files) == 2 and (whole.step, whole.settings, whole.extra) == (4, 0, 0)
    copies = manifest.joined([_part(0), _part(1), _part(1)], HERE)
    assert copies == whole, "of a number that two wrote the first counts"
    for other, why in (
        (_part(1, step=5), "different steps"),
        (replace(_part(1), model="other"), "different steps or models"),
        (_part(1, dtype="float64"), "in different ways"),
        (_part(1, rows=1), "have 9 elements, it has 12"),
        (_part(0), "have 6 elements"),
    ):
        with pytest.raises(DamagedError, match=why):
            manifest.joined([_part(0), other], HERE)


@dataclass(frozen=True)
class _Place:
    """A node that has all of the files, unless it says no."""

    node: int
    files: tuple = ()
    why: str = ""
    saves: tuple = ()

    def held(self):
        return [save.dumps() for save in self.saves]

    def read_into(self, name, start, view):
        if self.why:
            raise OSError(self.why)
        view[:] = f"{self.node}{name[-2:]}{start}".encode()
        return len(view)

    def read_text(self, name):
        if self.why:
            raise OSError(self.why)
        return dict(self.files)[name.partition("/")[2]]


def _memory(*places):
    return NodeMemory(HERE, "", 0, -1, places)


def test_a_node_that_does_not_answer_is_passed_over():
    memory = _memory(_Place(1, why="gone"), _Place(2))
    found = Remembered(memory, 4, None, {"a": (3, 1, 2), "b": (1,)})
    view = memoryview(bytearray(4))
    assert found.read_into("a", 7, view) == 4 and bytes(view) == b"2/a7"
    with pytest.raises(DamagedError, match="b in the memory of node 1 cannot be read: gone"):
        found.read_into("b", 0, view)
    with pytest.raises(DamagedError, match="nobody has it"):
        found.read_into("c", 0, view)


def _files(*ranks):
    return tuple(
        (f"part-{rank:05d}.json", f"{{}}\n{manifest.dumps(_part(rank))}") for rank in ranks
    )


def _save(step, save, ranks, *of):
    names = (f"part-{rank:05d}.{kind}" for rank in of for kind in ("json", "safetensors"))
    return KeptSave(step, save, ranks, tuple(names))


def test_the_newest_that_is_whole_is_taken(capsys):
    """Node 1 has seen step 5 twice, node 2 once: no two saves are joined."""
    old = _save(4, "0/0", 2, 0, 1)
    one = _Place(1, _files(0, 1), saves=(_save(5, "0/2", 2, 0), old))
    two = _Place(2, _files(0, 1), saves=(_save(5, "0/1", 2, 1), old))
    found = newest(_memory(one, two), 3)
    assert (found.step, found.whole.step, len(found.holders)) == (4, 4, 4)
    assert set(map(tuple, found.holders.values())) == {(1, 2)}
    said = capsys.readouterr().err
    assert "step 5 in memory is of no use: nobody has the parts of ranks 1" in said
    assert "nobody has the parts of ranks 0" in said
    assert newest(_memory(one, two), 4) is None, "the disk has that step"
    dead = replace(one, why="gone", saves=(old,))
    assert newest(_memory(dead, two), 3).step == 4
    assert newest(_memory(dead, replace(two, saves=())), 3) is None
    assert "step 4 in memory is of no use: gone" in capsys.readouterr().err
