"""What this process runs on."""

import os
import platform
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from meshwright.ir.profile.profile import Machine

_CPUINFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")


def machine(device: torch.device) -> Machine:
    """Device, driver and torch; the backend is that of the job, if there is one."""
    cuda = device.type == "cuda"
    default = "nccl" if cuda else "gloo"
    backend = dist.get_backend() if dist.is_initialized() else default
    return Machine(
        device=torch.cuda.get_device_name(device) if cuda else _cpu(),
        kind="cuda" if cuda else "cpu",
        driver=_driver() if cuda else platform.release(),
        torch=torch.__version__,
        backend=default if "nccl" in backend or ":" in backend else backend,
        cores=0 if cuda else len(os.sched_getaffinity(0)),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory
        if cuda
        else psutil.virtual_memory().total,
    )


def _cpu() -> str:
    """The model name of the first core."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _driver() -> str:
    """The kernel module's version, else CUDA's."""
    words = _NVIDIA.read_text().split() if _NVIDIA.exists() else []
    numbers = (word for word in words if word.replace(".", "").isdigit() and "." in word)
    return next(numbers, f"cuda {torch.version.cuda}")
