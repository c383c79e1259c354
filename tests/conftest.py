"""Settings that every test needs."""

import atexit
import gc
import os
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from meshwright.ir.garbage import FEWER_OBJECTS, keep_aside, take_back
from tests import both_ends
from tests.huge_pages import use_huge_pages
from tests.run_folder import make_folder
from tests.sampled import ALL_CASES, picked

# Tests fork ranks; a parent that has used several OpenMP threads makes forked children hang.
torch.set_num_threads(1)

make_folder()

# What is found out about operators is kept for the run of the tests, not among the user's files.
os.environ["MESHWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="cache-")

# Tests compare jobs with plain PyTorch themselves; those of the check turn it on.
os.environ.setdefault("MESHWRIGHT_CHECK", "0")

# Whether there are GPUs is asked of their driver's library: a process that has asked CUDA cannot
# fork others that use it, and tests fork whatever runs on a GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Precisions that only tests ask for.
os.environ.setdefault("MESHWRIGHT_PRECISIONS", str(Path(__file__).parent / "precisions"))

# There are more ranks than cores: a thread of Gloo's that wakes up and pushes aside the one that
# holds its lock asks for the lock until its turn is over. Those of a batch push nobody aside.
if hasattr(os, "SCHED_BATCH"):
    with suppress(OSError):  # a sandbox may refuse; it is only slower then
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Tests make much that stays; looking for cycles among it took a tenth of their time.
gc.set_threshold(FEWER_OBJECTS, *gc.get_threshold()[1:])

# Cores are shared: how long an example takes says nothing.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases", action="store_true",
        help="run what is `slow` and every case of what is `sampled`, as `make test-all` does",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(both_ends)
    if config.getoption("--all-cases"):
        os.environ[ALL_CASES] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_gpus(items)
    _leave_out_cases(config, items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What collection made stays: nobody looks through it again, and forked ranks share its memory
    with this process as nobody writes there."""
    keep_aside()
    # Else libraries complain, at the end, of what they still have. Not before: pytest's last act is
    # to collect garbage five times.
    atexit.register(take_back)
    use_huge_pages()


def _leave_out_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests that are marked `sampled`, some cases run, and none of those marked `slow`; all if
    one was asked for by its name, and all cases for a GPU of what is sampled: they are skipped
    where there is none, and few machines have one."""
    if ALL_CASES in os.environ or any("::" in argument for argument in config.args):
        return
    slow = {item for item in items if item.get_closest_marker("slow")}
    by_test: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    sampled = [
        item for item in items
        if item.get_closest_marker("sampled") and not item.get_closest_marker("gpu")
    ]  # fmt: skip
    for item in sampled:
        if isinstance(item, pytest.Function):
            values = frozenset(f"{name} {value}" for name, value in item.callspec.params.items())
            by_test[item.nodeid.split("[")[0]][item.nodeid] = values
    kept = {case for cases in by_test.values() for case in picked(cases)}
    left = slow | {item for item in sampled if item.nodeid not in kept}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def _leave_out_gpus(items: list[pytest.Item]) -> None:
    """What is marked `gpu` is left out where there is none, and says so."""
    found = [item for item in items if item.get_closest_marker("gpu")]
    if why := _why_no_gpu() if found else "":
        for item in found:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {why}"))


def _why_no_gpu() -> str:
    """Empty where there is one. Another process looks, as this one must not use CUDA."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is without CUDA"
    from meshwright.testing.spawn import alone  # once what is set above is set

    return "" if alone(torch.cuda.device_count) else "torch sees none"
