"""The demo's own parts; what it runs has tests elsewhere."""

import pytest
from rich.console import Console

from meshwright import demo
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.profile.profile import Profile


def test_options():
    assert demo.parse([]) == demo.DemoOptions(role="main", minutes=demo.MINUTES, quiet=False)
    assert demo.parse(["worker", "--minutes", "0", "--quiet"]) == demo.DemoOptions(
        "worker", 0.0, True
    )
    with pytest.raises(SystemExit):
        demo.parse(["everything"])


def test_model_is_measured_in_the_time_given(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    given = []

    def profile(graph, cluster, **options):
        given.append(options["minutes"])
        return Profile(machine=None)

    monkeypatch.setattr(demo, "profile", profile)
    for minutes in (0.0, 0.5):
        options = demo.DemoOptions(role="main", minutes=minutes, quiet=True)
        found = demo.measure_model(None, Cluster.local(demo.RANKS), options, Console(quiet=True))
        assert (found is None) == (minutes == 0)
    assert given == [0.5]
