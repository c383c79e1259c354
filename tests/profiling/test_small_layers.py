"""What dispatching takes, by layers that do little else."""

from dataclasses import replace

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.profiling.small_layers import _priced_s, dispatch_s


def test_dispatch_is_what_makes_the_price_of_layers_what_they_took() -> None:
    device = replace(Cluster.local(1).device_types[0], overhead_s=3e-6)
    truth = replace(device, overhead_s=4.5e-6)
    assert dispatch_s(device, _priced_s(truth)) == pytest.approx(4.5e-6)
    assert dispatch_s(device, 0.5 * _priced_s(device)) == device.overhead_s
