"""A cluster whose constants are those of a profile's machine."""

from dataclasses import replace

from meshwright.costmodel.fit.calibrate_links import fit_links
from meshwright.costmodel.fit.fit_compute import fit_device, record_work
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.profile.profile import OpRecord, Profile

_STREAMS = (OpClass.ELEMENTWISE, OpClass.COPY)
_LEAST_BYTES = 2**20
"""Smaller ops tell the cache's bandwidth."""


def calibrated(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with device types and links fitted to what was measured.

    A device type of another kind than the profile's machine stays as it is, and so does what the
    profile says nothing about.
    """
    types = tuple(
        calibrated_device(device, profile) if device.kind == profile.machine.kind else device
        for device in cluster.device_types
    )
    return fit_links(replace(cluster, device_types=types), profile)


def calibrated_device(device: DeviceType, profile: Profile) -> DeviceType:
    """The device with curves fitted to the profile's ops."""
    records = [r for r in profile.ops.values() if r.forward.median_s > 0.0]
    if not any(r.op_class != OpClass.VIEW for r in records):
        return device
    if device.kind == "cpu":
        # A preset says nothing of this CPU: the fastest that was seen is its peak.
        device = _with_seen_peaks(device, records)
    machine = profile.machine
    return replace(
        fit_device(device, records),
        source="fitted",
        reference=f"{len(records)} ops measured on {machine.device}, torch {machine.torch}",
    )


def _with_seen_peaks(device: DeviceType, records: list[OpRecord]) -> DeviceType:
    overhead = _overhead_s(records, device)
    peaks = dict(device.peak_flops)
    for dtype in {r.dtype for r in records}:
        rates = [_flops_rate(r) for r in records if r.dtype == dtype and _is_product(r)]
        if rates:
            peaks[dtype] = min(1e18, max(1e6, *rates))
    streams = [
        r.moved_bytes / r.forward.median_s
        for r in records
        if r.op_class in _STREAMS and r.moved_bytes >= _LEAST_BYTES
    ]
    bandwidth = max(streams, default=device.memory_bandwidth_bytes_per_s)
    return replace(
        device,
        peak_flops=peaks,
        memory_bandwidth_bytes_per_s=max(1e7, bandwidth),
        overhead_s=overhead,
    )


def _is_product(record: OpRecord) -> bool:
    return record.op_class == OpClass.MATMUL and record.flops > 0


def _flops_rate(record: OpRecord) -> float:
    return record_work(record, "cpu").flops / record.forward.median_s


def _overhead_s(records: list[OpRecord], device: DeviceType) -> float:
    """No op can cost more to dispatch than the fastest of all took."""
    fastest = min(r.forward.median_s for r in records if r.op_class != OpClass.VIEW)
    return min(device.overhead_s, fastest)
