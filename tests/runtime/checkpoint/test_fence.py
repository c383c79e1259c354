"""Ranks whose supervisor leads no more leave what the others save as it is."""

import pytest
import torch

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import checkpoint, fence
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.checkpoint import Snapshot, write_whole
from meshwright.runtime.checkpoint.parts import Box


def test_a_checkpoint_is_kept_by_ranks_of_whoever_leads(tmp_path, monkeypatch):
    lease, saved, write = tmp_path / "leader", tmp_path / "saved", checkpoint.write
    saved.mkdir()
    lease.write_text("mine 000")
    monkeypatch.setenv(*fence.named_by(lease, "mine").popitem())

    def save(step):
        box = Box("w", (2,), (0,), torch.zeros(2))
        write_whole(Snapshot(step, "model", {}, {}, [box], {}), saved, 0, 1, alone=True)

    def slowly(*given):
        write(*given)
        lease.write_text("theirs 000")

    save(1)
    monkeypatch.setattr(checkpoint, "write", slowly)
    with pytest.raises(PlanError, match="another node leads"):
        save(2)
    assert folders.named(saved) == "step-00000001", "the lease went while it was written"
    before = sorted(saved.iterdir())
    with pytest.raises(PlanError, match="another node leads"):
        save(3)
    assert sorted(saved.iterdir()) == before, "nothing was begun"
