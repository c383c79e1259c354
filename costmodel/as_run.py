"""A cluster as a software stack uses it: the same machines, with what the stack makes of them."""

from dataclasses import replace
from functools import partial
from typing import TypeGuard

from meshwright.costmodel.cluster_parts import with_parts
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Row, Send
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, Link, OpClass
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.styles import Style

WHOLE = 2**50
"""Bytes of a bucket that holds everything."""


def as_run(cluster: Cluster, style: Style) -> Cluster:
    """Returns the cluster whose devices and links take what they take in whole runs of a stack.

    CPUs stay as they are: what is known of them was measured in whole runs of ours.
    """
    if all(device.kind == "cpu" for device in cluster.device_types):
        return cluster
    link = partial(_link, style=style)
    return with_parts(cluster, partial(_device, style=style), link, link)


def changes_exchanges(style: Style) -> bool:
    """Tells whether the stack's replicas agree otherwise than plans of ours say."""
    return style.all_reduces or style.beside_replicas or bool(style.late)


def as_exchanged(exchange: Exchange, style: Style) -> Exchange:
    """Returns the exchange whose gradients agree as the stack has it, where the plan names no form
    of its own."""
    rows = exchange.rows
    if style.all_reduces and any(_is_scattered(row) for row in rows):
        rows = tuple(_over_all(row) for row in rows if not _is_second_half(row))
    if style.beside_replicas:
        rows = tuple(_beside_backward(row) for row in rows)
    if exchange.form in style.late:
        at_end = tuple(_at_the_end(row) for row in rows)
        return replace(exchange, rows=at_end, bucket_bytes=WHOLE)
    return exchange if rows is exchange.rows else replace(exchange, rows=rows)


def _is_second_half(row: Row) -> TypeGuard[Send]:
    return isinstance(row, Send) and row.what == "gradients" and row.axis == "dp_replicate"


def _is_scattered(row: Row) -> TypeGuard[Send]:
    """Gradients of a bucket, of which each rank gets a part and has whole parameters."""
    if not isinstance(row, Send) or row.primitive is not Primitive.REDUCE_SCATTER:
        return False
    return row.unit == "bucket"


def _over_all(row: Row) -> Row:
    if _is_scattered(row):
        return replace(row, primitive=Primitive.ALL_REDUCE, axis="dp")
    return row


def _beside_backward(row: Row) -> Row:
    if _is_second_half(row) and row.at is Event.END:
        return replace(row, at=Event.AFTER_LAST, unit="block")
    return row


def _at_the_end(row: Row) -> Row:
    if isinstance(row, Send) and row.what == "gradients" and row.at < Event.END:
        return replace(row, at=Event.END, until=Event.END, adds=False)
    return row


def _device(device: DeviceType, style: Style) -> DeviceType:
    if device.kind == "cpu":
        return device
    curves = dict(device.curves)
    for op_class, curve in device.curves.items():
        slower = curve.in_runs(style.libraries)
        if op_class is OpClass.ATTENTION:
            slower *= style.attention
        # `wide_share` stays: no whole run of float32 told of it.
        if curve.narrow_sustained:
            narrow = (curve.narrow_share or curve.share) / curve.narrow_in_runs(style.libraries)
            curves[op_class] = replace(curve, share=curve.share / slower, narrow_share=narrow)
        elif slower != 1.0:
            curves[op_class] = replace(curve, share=curve.share / slower)
    return replace(device, curves=curves, launching=device.launching or style.launching,
                   casting=device.casting or style.casting)  # fmt: skip


def _link(link: Link, style: Style) -> Link:
    """Where only a share of the work hides messages, these go on as much more slowly beside it."""
    if style.hides == 1.0:
        return link
    slower = 1 / style.hides
    return replace(
        link, overlap_comm_slowdown=link.overlap_comm_slowdown * slower,
        beside=tuple((nbytes, work, comm * slower) for nbytes, work, comm in link.beside),
    )  # fmt: skip
