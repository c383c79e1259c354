"""A shell script that starts the job's ranks on one node; run it once on each of them."""

from meshwright.running.launch_shape import launch_shape
from meshwright.tools.export.export import Exported, Request, shell, title_comment


def export(request: Request) -> Exported:
    shape = launch_shape(request.plan, request.cluster)
    lines = ["#!/usr/bin/env bash", title_comment(request.plan)]
    arguments = ["--nnodes", str(shape.num_nodes), "--nproc-per-node", str(shape.per_node)]
    if shape.num_nodes > 1:
        lines += [
            "# On every node, with MASTER_ADDR a host name of node 0 and NODE_RANK its number:",
            "# the plan's ranks follow the nodes.",
        ]
        address = '--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"'
        address += ' --master-port "$MASTER_PORT"'
    else:
        address = "--standalone"
    lines.append("set -euo pipefail")
    if shape.num_nodes > 1:
        lines += [
            ': "${MASTER_ADDR:?host name of node 0}" "${NODE_RANK:?number of this node}"',
            ': "${MASTER_PORT:=29500}"',
        ]
    lines += ['export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"']
    start = f"exec torchrun {shell(tuple(arguments))}"
    lines += [f"{start} \\", f"  {address} \\", f"  {shell(request.command)}"]
    return Exported("\n".join(lines) + "\n", shape.missing)
