"""A batch script for Slurm: one torchrun per node, which starts a rank per device."""

import re

from meshwright.running.launch_shape import LaunchShape, launch_shape
from meshwright.runtime.world.leaving import LEAVE
from meshwright.tools.export.export import Exported, Request, shell, title_comment

WARNED_S = 120
"""Ahead of the time limit, jobs that save are asked to."""


def export(request: Request) -> Exported:
    shape = launch_shape(request.plan, request.cluster)
    return Exported(_text(request, shape), shape.missing)


def _text(request: Request, shape: LaunchShape) -> str:
    saves = request.saves
    return f"""\
#!/usr/bin/env bash
{title_comment(request.plan)}
#SBATCH --job-name={_job_name(request.plan.model.name)}
#SBATCH --nodes={shape.num_nodes}
#SBATCH --ntasks-per-node=1
{_devices(shape)}
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
{_WARNED if saves else ""}set -euo pipefail
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT="${{MASTER_PORT:-29500}}"
{_ASKED if saves else ""}
# Node ranks are Slurm's, since the plan's ranks follow the nodes.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \\
  --nnodes "$SLURM_NNODES" --nproc-per-node {shape.per_node} --node-rank "$SLURM_NODEID" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' \\
  torchrun {shell(request.command)}{_AGAIN if saves else ""}
"""


_WARNED = f"""\
#SBATCH --signal=B:USR1@{WARNED_S}
#SBATCH --requeue
#SBATCH --open-mode=append
"""
# torchrun and the ranks take as long as Slurm gives them, less what it takes to tell them.
_ASKED = f"""\
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={WARNED_S - 5} {LEAVE}={WARNED_S - 10}
asked=0
trap 'asked=1; kill -TERM "$job" 2>/dev/null || true' USR1 TERM
"""
_AGAIN = """ &
job=$!
while :; do code=0; wait "$job" || code=$?; kill -0 "$job" 2>/dev/null || break; done
# Asked to end, all ranks have saved: the job is queued again, and goes on from there.
if [ "$asked" = 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code"""


def _devices(shape: LaunchShape) -> str:
    what = "gpus-per-node" if shape.on_gpu else "cpus-per-task"
    return f"#SBATCH --{what}={shape.per_node}"


def _job_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "-", model)[:60]
