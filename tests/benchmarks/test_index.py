"""`python -m benchmarks` lists the programs that are there."""

from benchmarks.__main__ import HERE, programs


def test_each_program_is_listed_with_what_it_does():
    found = dict(programs())
    assert {"dapple", "dapple.table4", "fit.links", "overlap", "attack", "zoo"} <= found.keys()
    assert all(found.values())
    for name in found:
        path = HERE.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() != (path / "__main__.py").exists()


def test_a_new_file_is_listed(tmp_path):
    (tmp_path / "wombat.py").write_text(
        '"""Counts wombats\nat night.\n\nMore."""\n\nif __name__ == "__main__":\n    pass\n'
    )
    (tmp_path / "library.py").write_text('"""Is no program."""\n')
    assert dict(programs(tmp_path)) == {"wombat": "Counts wombats at night."}
