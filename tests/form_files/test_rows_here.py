"""Rows of a batch that are here: ids that are known are found as those that are looked for."""

import pytest
import torch

from meshwright.forms.rows_here import NamedRows, RowsHere

COUNT = 50


def test_ids_of_the_batch_are_found_in_any_order_as_by_looking() -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, COUNT, (24,), generator=draw)
    known, plain = NamedRows.of(ids, COUNT), NamedRows(ids.unique())  # type: ignore[no-untyped-call]
    assert known.places is not None and torch.equal(known.rows, plain.rows)
    here, searched = RowsHere("words", known), RowsHere("words", plain)
    parts = list(torch.split(ids.clone().view(-1, 2), 4))
    # Micro-batches in order, made again, the whole, and ids in an order that no batch has.
    for part in (*parts, *parts, parts[1], ids, ids.flip(0), ids[:0], parts[2].int()):
        found = here.places(part)
        assert torch.equal(found, searched.places(part)) and found.dtype == part.dtype
        assert torch.equal(known.rows[found.long()], part.long())
    assert here.has(ids, COUNT) and here.has(ids[3:9], COUNT) and here.has(ids.flip(0), COUNT)
    # The batch's own memory has the next batch by now.
    missing = next(row for row in range(COUNT) if row not in ids.tolist())
    ids.fill_(missing)
    assert not here.has(ids, COUNT)
    with pytest.raises(RuntimeError, match="an index of words is out of range"):
        here.places(ids)


def test_what_is_no_row_is_left_out_and_refused_where_it_is_looked_up() -> None:
    ids = torch.tensor([3, -1, 7, COUNT, 3])
    named = NamedRows.of(ids, COUNT)
    assert named.rows.tolist() == [3, 7] and named.places is None
    here = RowsHere("words", named)
    assert here.has(ids, COUNT)
    with pytest.raises(RuntimeError, match="out of range"):
        here.places(ids)
