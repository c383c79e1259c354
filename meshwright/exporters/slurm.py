"""A batch script for Slurm: one torchrun per node, which starts a rank per device."""

import re

from meshwright.running.launch_shape import LaunchShape, launch_shape
from meshwright.tools.export.export import Exported, Request, shell, title_comment


def export(request: Request) -> Exported:
    shape = launch_shape(request.plan, request.cluster)
    return Exported(_text(request, shape), shape.missing)


def _text(request: Request, shape: LaunchShape) -> str:
    return f"""\
#!/usr/bin/env bash
{title_comment(request.plan)}
#SBATCH --job-name={_job_name(request.plan.model.name)}
#SBATCH --nodes={shape.num_nodes}
#SBATCH --ntasks-per-node=1
{_devices(shape)}
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
set -euo pipefail
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT="${{MASTER_PORT:-29500}}"

# Node ranks are Slurm's, since the plan's ranks follow the nodes.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \\
  --nnodes "$SLURM_NNODES" --nproc-per-node {shape.per_node} --node-rank "$SLURM_NODEID" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' \\
  torchrun {shell(request.command)}
"""


def _devices(shape: LaunchShape) -> str:
    what = "gpus-per-node" if shape.on_gpu else "cpus-per-task"
    return f"#SBATCH --{what}={shape.per_node}"


def _job_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "-", model)[:60]
