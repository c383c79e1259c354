"""Remakes the curves of links in `ir/cluster/links.py` and `ir/presets` from published NCCL
timings, and reports the error held out.

python -m benchmarks.fit.links CALIBRATE_DIR [-o docs/results/links.md] [--presets]

CALIBRATE_DIR holds nccl_single_node_aiconfigurator.json, network_collectives_measured.json and
hf_ultrascale_scaling_and_bandwidth.json. A fit on every other size is judged on the rest; the
curves that ship are fitted to all.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from math import ceil, log2
from pathlib import Path
from statistics import median

from benchmarks.fit.fit_comm import (
    CommTiming,
    Points,
    errors,
    fit_curves,
    fit_points,
    halves,
    outer_timings,
)
from benchmarks.fit.link_tables import (
    NCCL,
    NETWORK,
    PLAYBOOK,
    Series,
    continued,
    nccl_rows,
    other_series,
    p5_series,
    two_node_groups,
)
from benchmarks.fit.preset_text import call, put
from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.ir.cluster.device import Curve, Link
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.presets import LINKS

BANDS = {"< 64 KiB": 2.0**16, "< 8 MiB": 2.0**23, "larger": float("inf")}
# The first calls of the table of AWS p6 took ten times as long as those of 256 KiB after them.
WARMED_UP_BYTES = 2**18
_SILENT_BYTES = 2**24
_FABRIC = replace(LINKS["infiniband-hdr"], name="fabric-100g", bandwidth_bytes_per_s=12.5e9)
_INNER = {"efa-p5": "nvlink4", "efa-p6": "nvlink5", "fabric-100g": "nvlink3"}


def bare(link: Link) -> Link:
    """The link by its constants alone."""
    return replace(link, curves=())


def vtrain_v100(series: Iterable[Series]) -> list[CommTiming]:
    return [row for s in series if s.link == "nvlink2" for row in s.rows]


def network_points(series: Series, inner: Link, outer: Link) -> dict[str, Points]:
    """Operation -> curve of the tier between the nodes of the series."""
    near, far = Level(series.inside, inner), Level(series.nodes, outer)
    found = {}
    for operation in sorted({row.operation for row in series.rows}):
        timings = [
            (row.nbytes, row.seconds)
            for row in series.rows
            if row.operation == operation and row.nbytes >= WARMED_UP_BYTES
        ]
        if timings[0][0] >= _SILENT_BYTES:
            # Large messages say nothing of latency; the constants of the link do.
            timings.insert(0, (0.0, collective_time(Primitive(operation), 0.0, (near, far))))
        found[operation] = fit_points(outer_timings(timings, near, far, operation))
    return found


def shipped(folder: Path) -> dict[str, tuple[Curve, ...]]:
    """Preset link -> curves fitted to all timings."""
    p5 = p5_series()
    series = [*other_series(folder), continued(*p5[-2:])]
    found = {link: fit_curves(rows) for link, rows in nccl_rows(folder).items()}
    found["nvlink2"] = tuple(map(_from_nothing, fit_curves(vtrain_v100(series))))
    for s in series:
        if s.nodes > 1 and s.link in LINKS and not s.judges:
            inner = replace(LINKS[_INNER[s.link]], curves=found[_INNER[s.link]])
            points = network_points(s, inner, bare(LINKS[s.link]))
            found[s.link] = (
                *found.get(s.link, ()),
                *(Curve(operation=op, size=s.nodes, points=p) for op, p in points.items()),
            )
    return found


def _from_nothing(known: Curve) -> Curve:
    """The table of V100 starts at 1 MiB; below, the constants of the link say where to start."""
    link = LINKS["nvlink2"]
    start = link.launch_s + 2 * ceil(log2(known.size)) * link.step_s
    return replace(known, points=((0.0, start), *known.points))


def texts(curves: Mapping[str, Sequence[Curve]]) -> dict[str, str]:
    """Name of an assignment in a file of presets -> its source text, for each link with curves."""
    found = {}
    for link, known in curves.items():
        name = f"{link.upper().replace('-', '_')}_CURVES"
        made = ""
        for c in known:
            points = [f"({round(n)}, {s * 1e6:.4g})" for n, s in c.points]
            made += call("    curve(", [f'"{c.operation}"', str(c.size), *points], "),")
        found[name] = f"{name} = (\n{made})\n"
    return found


def summary(found: Sequence[float]) -> str:
    if not found:
        return "-"
    ordered = sorted(map(abs, found))
    return f"{median(ordered):.1%} / {ordered[int(0.9 * (len(ordered) - 1))]:.1%}"


def single_table(folder: Path) -> Iterable[str]:
    yield "| link | operation | " + " | ".join(BANDS) + " | all | constants alone |"
    yield "|---|---|" + "---|" * (len(BANDS) + 2)
    for name, rows in nccl_rows(folder).items():
        first, second = halves(rows)
        fitted = replace(LINKS[name], curves=fit_curves(first))
        for operation in (*sorted({row.operation for row in rows}), "all"):
            held = [row for row in second if operation in (row.operation, "all")]
            cells, least = [], 0.0
            for most in BANDS.values():
                cells.append(summary(errors(fitted, [r for r in held if least <= r.nbytes < most])))
                least = most
            cells += [summary(errors(fitted, held)), summary(errors(bare(LINKS[name]), held))]
            yield f"| {name} | {operation} | " + " | ".join(cells) + " |"


def series_errors(series: Series, inner: Link, outer: Link | None) -> list[float]:
    levels = (Level(series.inside, inner),)
    if outer is not None:
        levels += (Level(series.nodes, outer),)
    return [
        collective_time(Primitive(row.operation), row.nbytes, levels) / row.seconds - 1
        for row in series.rows
        if row.nbytes >= WARMED_UP_BYTES
    ]


def other_table(folder: Path) -> Iterable[str]:
    yield "| source | GPUs | link | timings | shipped curves | constants alone |"
    yield "|---|---|---|---|---|---|"
    for s in other_series(folder):
        if s.nodes == 1:
            inner, outer = LINKS[s.link], None
        else:
            inner, outer = LINKS[_INNER[s.link]], LINKS.get(s.link, _FABRIC)
        mine = summary(series_errors(s, inner, outer))
        old = summary(series_errors(s, bare(inner), outer and bare(outer)))
        fitted = outer in LINKS.values() and not s.judges
        seen = "; fitted to these" if fitted or s.link == "nvlink2" else ""
        yield (
            f"| {s.source} | {s.nodes} x {s.inside} | {s.link} | {len(s.rows)} | {mine}{seen} "
            f"| {old} |"
        )


def left_out_table() -> Iterable[str]:
    """Node counts of AWS p5 predicted from the others."""
    operations = sorted({row.operation for s in p5_series() for row in s.rows})
    yield f"| nodes left out | {' | '.join(operations)} |"
    yield "|---|" + "---|" * len(operations)
    inner, link = LINKS["nvlink4"], LINKS["efa-p5"]
    for s in p5_series():
        without = replace(link, curves=tuple(c for c in link.curves if c.size != s.nodes))
        found = list(zip(s.rows, series_errors(s, inner, without), strict=True))
        cells = (summary([e for row, e in found if row.operation == op]) for op in operations)
        yield f"| {s.nodes} | " + " | ".join(cells) + " |"


def p5_held_out() -> Iterable[str]:
    """Every other size fitted, the rest predicted."""
    yield "| nodes | every other size |"
    yield "|---|---|"
    inner, link = LINKS["nvlink4"], bare(LINKS["efa-p5"])
    for s in p5_series():
        first, second = (replace(s, rows=tuple(rows)) for rows in halves(s.rows))
        points = network_points(first, inner, link)
        curves = tuple(Curve(operation=op, size=s.nodes, points=p) for op, p in points.items())
        errors_s = series_errors(second, inner, replace(link, curves=curves))
        yield f"| {s.nodes} | {summary(errors_s)} |"


def strided_table(folder: Path) -> Iterable[str]:
    """All-reduces on two nodes by the rate of messages between them."""
    yield "| GPUs | on a node | measured | predicted |"
    yield "|---|---|---|---|"
    groups, port = two_node_groups(folder)
    outer = Link(name="port", bandwidth_bytes_per_s=port, latency_s=0.0)
    for size, per_node, rate in groups:
        inner = (Level(per_node, LINKS["nvlink3"]),) if per_node > 1 else ()
        nbytes = 2.0**30
        seconds = collective_time(Primitive.ALL_REDUCE, nbytes, (*inner, Level(2, outer)))
        predicted = 2 * (size - 1) / size * nbytes / seconds
        yield f"| {size} | {per_node} | {rate / 1e9:.1f} GB/s | {predicted / 1e9:.1f} GB/s |"


def report(folder: Path) -> str:
    parts = [
        "# Links: error of fitted collective times",
        f"{date.today():%d %B %Y}; `python -m benchmarks.fit.links CALIBRATE_DIR -o "
        "docs/results/links.md`. Cells are median / 90th percentile of the absolute relative "
        'error. "Constants alone" is the alpha-beta model that holds where a link has no curve.',
        "## Inside a node: fitted on every other size, judged on the rest",
        "\n".join(single_table(folder)),
        "## Other sources, and several nodes",
        "From 256 KiB on. Rows that say so were fitted to these timings; the others are "
        "independent of the fit, on machines, NCCL versions and benchmarks of their own.",
        "\n".join(other_table(folder)),
        "## Strided groups on two nodes of eight A100",
        "Bus bandwidth of large all-reduces (Hetu-Galvatron; fabric not named), all groups of a "
        "kind at once, predicted from the rate of messages between the nodes alone. A group with "
        "k members on a node uses k ports.",
        "\n".join(strided_table(folder)),
        "## AWS p5: node counts left out",
        "32 MiB to 8 GiB. The medians of the Ultra-Scale Playbook above are of another kind: two "
        "thirds of its jobs ran with torch's check of every collective on, which takes the CPU 0.3 "
        "ms for each rank (docs/results/published.md, note 32); they are no part of the curves.",
        "\n".join(left_out_table()),
        "\n".join(p5_held_out()),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--presets", action="store_true", help="write the curves into their files")
    args = parser.parse_args()
    if missing := [n for n in (NCCL, NETWORK, PLAYBOOK) if not (args.folder / n).is_file()]:
        sys.exit(f"{args.folder} lacks {', '.join(missing)}; it must hold the calibration tables")
    if args.presets:
        for name, made in texts(shipped(args.folder)).items():
            if not put(name, made):
                sys.exit(f"no file of presets assigns {name}")
        return
    text = report(args.folder)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
