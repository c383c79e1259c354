"""How sure a preset's figures are of another machine than those that they were measured on.

A curve's own band says how well it fits the machine that it is of. Other machines of the kind have
other clocks, power limits, libraries and cables: what follows is by how much four fifths of them
differ, by the calibration tables (`python -m benchmarks.fit.elsewhere CALIBRATE_DIR`).
"""

from dataclasses import replace
from math import hypot

from meshwright.costmodel.cluster_parts import with_parts
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import COMPUTE, DeviceType, Link, OpCurve

PRODUCTS = 0.071
"""Of large products: 34 tests of seven parts, each by what the others say."""
RUNS = 0.273
"""Of what ops take in whole runs, on parts where no whole run was compared with kernels alone: what
would be missed of the four factors that are known."""
INSIDE = 0.36
"""Of messages of 16 MiB and more inside of a node: 176 of five machines."""
BETWEEN = 0.43
"""Of collectives over two to eight nodes, with the same cards in another cluster: nine."""


def as_elsewhere(cluster: Cluster) -> Cluster:
    """Returns the cluster with the bands that figures of other machines have; those measured on
    the cluster itself stay, and so do CPUs, which are always measured."""
    if all(device.kind == "cpu" for device in cluster.device_types):
        return cluster
    return with_parts(
        cluster, _device, lambda link: _link(link, INSIDE), lambda link: _link(link, BETWEEN)
    )


def _device(device: DeviceType) -> DeviceType:
    if device.kind == "cpu":
        return device
    curves = {
        op_class: _curve(curve) if op_class in COMPUTE else curve
        for op_class, curve in device.curves.items()
    }
    return replace(device, curves=curves)


def _curve(curve: OpCurve) -> OpCurve:
    if curve.source == "measured":
        return curve
    return replace(curve, band=hypot(curve.band, PRODUCTS, 0.0 if curve.sustained else RUNS))


def _link(link: Link, apart: float) -> Link:
    """Bands of data sheets and assumptions are of machines unseen as they are."""
    if link.source != "fitted":
        return link
    return replace(link, fit_error=hypot(link.band, apart))
