"""The demo's own parts; what it runs has tests elsewhere."""

from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("pace", "others", "band", "said"),
    [(1.0, 0.0, "10%", "outside"), (1.25, 0.0, "30%", "inside"), (0.8, 0.0, "35%", "inside"),
     (1.0, 0.15, "25%", "inside")],
)  # fmt: skip
def test_the_band_widens_with_what_the_machine_did_meanwhile(monkeypatch, pace, others, band, said):
    """A step of 1.25 s that was said to take 1 s."""
    resident = SimpleNamespace(resident_peak_bytes=2, resident_start_bytes=1)
    monkeypatch.setattr(
        demo.measured, "load_run", lambda folder: [SimpleNamespace(memory=resident)]
    )
    memory = SimpleNamespace(used_bytes=2, parameters_bytes=1)
    predicted = SimpleNamespace(error_band=0.1, step_s=1.0, stages=[SimpleNamespace(memory=memory)])
    steps = [SimpleNamespace(step_s=1.25)] * 4
    table = demo._predictions(
        SimpleNamespace(predicted=predicted), demo.Meanwhile(pace, others), steps, steps
    )
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["step time", f"1.000 s +-{band}", "1.250 s", f"-20%, {said}"]
