"""What the machine is: device, driver, libraries, and which packages it lacks."""

import platform
from collections.abc import Iterator
from importlib import metadata

from benchmarks.gpu.results import PACKAGES
from benchmarks.gpu.step import Fact, Place, Step


def run(place: Place) -> Iterator[Fact]:
    """Yields names and versions; writes those of all packages, for `--needs --there`."""
    import torch

    yield "python", platform.python_version()
    yield "system", platform.platform()
    for name in ("torch", "triton", "transformers", "ortools", "pydantic"):
        yield f"version/{name}", _version(name)
    cluster = place.cluster()
    yield "preset", cluster.device_types[0].name
    if place.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield "device", properties.name
        yield "gpus", torch.cuda.device_count()
        yield "memory_bytes", properties.total_memory
        yield "processors", properties.multi_processor_count
        yield "capability", f"{properties.major}.{properties.minor}"
        yield "cuda", str(torch.version.cuda)
        yield "cudnn", str(torch.backends.cudnn.version())
        yield "nccl", ".".join(map(str, torch.cuda.nccl.version()))
        yield (
            "peers",
            sum(
                torch.cuda.can_device_access_peer(0, i) for i in range(1, torch.cuda.device_count())
            ),
        )
    from meshwright.runtime.job.machine import machine

    yield "machine", str(machine(torch.device(place.device)))
    found = {f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()}
    (place.out / PACKAGES).write_text("\n".join(sorted(found)) + "\n", encoding="utf-8")
    yield "packages", len(found)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


STEP = Step(
    name="environment", does="what the machine is", order=10, limit_s=10, least_s=5, run=run
)
