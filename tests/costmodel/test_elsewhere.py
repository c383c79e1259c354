"""Figures of one machine are less sure of another."""

from dataclasses import replace
from math import hypot

import pytest

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.elsewhere import BETWEEN, INSIDE, PRODUCTS, RUNS, as_elsewhere
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from tests.styles.small_llama import small_llama


def test_bands_of_presets_grow_and_those_of_measured_parts_stay() -> None:
    plain = Cluster.preset("h100-sxm", num_nodes=2, network="efa-p5")
    found = as_elsewhere(plain)
    before, after = plain.device_types[0].curves, found.device_types[0].curves
    product = before[OpClass.MATMUL]
    assert after[OpClass.MATMUL].band == hypot(product.band, PRODUCTS)
    assert after[OpClass.COPY] == before[OpClass.COPY]
    assert plain.between_nodes and found.between_nodes
    assert found.between_nodes.band == hypot(plain.between_nodes.band, BETWEEN)
    assert found.nodes[0].link.band == hypot(plain.nodes[0].link.band, INSIDE)
    assert found.nodes[0] is found.nodes[1]

    known = replace(plain.between_nodes, source="measured", fit_error=0.02)
    curve = replace(product, source="measured")
    device = replace(plain.device_types[0], curves={**before, OpClass.MATMUL: curve})
    measured = as_elsewhere(replace(plain, between_nodes=known, device_types=(device,)))
    assert measured.between_nodes == known
    assert measured.device_types[0].curves[OpClass.MATMUL] == curve
    assert as_elsewhere(Cluster.local(2)) == Cluster.local(2)


def test_parts_without_whole_runs_are_less_sure() -> None:
    known, unseen = (Cluster.preset(name).device_types[0] for name in ("a100-80", "l40s"))
    assert known.curves[OpClass.MATMUL].sustained and not unseen.curves[OpClass.MATMUL].sustained
    (device,) = as_elsewhere(Cluster.preset("l40s")).device_types
    band = unseen.curves[OpClass.MATMUL].band
    assert device.curves[OpClass.MATMUL].band == pytest.approx(hypot(band, PRODUCTS, RUNS))


def test_plans_are_priced_with_them() -> None:
    tables = CostTables(small_llama(), Cluster.preset("h100-sxm"), "bf16")
    (device,) = as_elsewhere(Cluster.preset("h100-sxm")).device_types
    (priced,) = tables.cluster.device_types
    assert priced.curves[OpClass.MATMUL].band == device.curves[OpClass.MATMUL].band
