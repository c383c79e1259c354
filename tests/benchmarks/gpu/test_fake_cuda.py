"""What only a GPU runs, on functions of `torch.cuda` that say what one would say."""

import os
import warnings
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import runner
from benchmarks.gpu.measured import time_steps
from benchmarks.gpu.results import PACKAGES
from benchmarks.gpu.step import Place
from benchmarks.gpu.steps import environment, host_time, kernels, rivals
from benchmarks.gpu.steps.batches import is_memory_gone

H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_520_809_984, major=9, minor=0,
                       multi_processor_count=132, uuid="x")  # fmt: skip
GIB = 2**30


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A place with one H100, as `torch.cuda` describes it."""
    says = {
        "is_available": True, "device_count": 1, "get_device_properties": H100,
        "get_device_name": H100.name, "synchronize": None, "empty_cache": None,
        "reset_peak_memory_stats": None, "max_memory_allocated": 3 * GIB,
        "max_memory_reserved": 4 * GIB, "memory_reserved": 4 * GIB,
        "mem_get_info": (70 * GIB, 75 * GIB), "set_sync_debug_mode": None,
    }  # fmt: skip
    for name, value in says.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return Place(out=tmp_path, device="cuda", plans=tmp_path, until=1e9)


def test_the_machine_is_found_by_its_name(place):
    facts = dict(environment.run(place))
    assert facts["preset"] == "h100-sxm" and facts["device"] == H100.name
    assert facts["nccl"] == "2.28.9" and facts["capability"] == "9.0" and facts["peers"] == 0
    assert "torch==" in (place.out / PACKAGES).read_text()
    assert place.cluster().name == "h100-sxm:1x1"


def test_a_device_without_a_preset_is_described_as_it_was_seen(place, monkeypatch):
    other = SimpleNamespace(**{**vars(H100), "name": "NVIDIA X9"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: other)
    assert place.cluster().device_types[0].name == "nvidia-x9"


def test_steps_are_timed_and_their_memory_is_the_allocators(place):
    facts = dict(time_steps(lambda batch: torch.tensor(2.5), (), place, 2).facts("m", "x_"))
    assert facts["m/x_loss"] == 2.5 and facts["m/x_step_s"] > 0
    assert facts["m/x_allocated_bytes"] == 3 * GIB and facts["m/x_reserved_bytes"] == 4 * GIB


def test_waits_that_torch_warns_of_are_counted_with_their_line(place):
    def step(batch: object) -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    facts = dict(host_time._on_gpu(SimpleNamespace(step=step), ()))
    assert facts["sync_warnings"] == 1 and facts["context_bytes"] == GIB
    (key,) = (key for key in facts if key.endswith("/waits"))
    assert key.startswith("test_fake_cuda.py:")


def test_kernels_are_timed_by_triton_on_a_cold_cache(place, monkeypatch):
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(testing, "do_bench", lambda call, **settings: 2.0)
    assert kernels.seconds_of(lambda: None, place) == 2e-3


@pytest.mark.parametrize(("forks", "gpus"), [(True, 2), (False, 2), (True, 0)])
def test_a_fork_tries_the_gpus(monkeypatch, forks, gpus):
    """Where it cannot use them, each step gets a Python of its own."""

    def zeros(*_: object, device: str) -> None:
        if not forks:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert runner.find_devices() == runner.Devices(gpus, forks)


def test_a_fork_that_dies_on_the_gpus_leaves_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: os.kill(os.getpid(), 9))
    assert runner.find_devices() == runner.Devices(0, False)


def test_memory_that_is_gone_is_a_finding_and_other_errors_are_errors():
    assert is_memory_gone(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert is_memory_gone(RuntimeError("CUDA error: out of memory"))
    assert not is_memory_gone(RuntimeError("shapes differ"))


@pytest.mark.parametrize(("gpus", "sizes"), [(2, ["2"]), (3, ["2"]), (8, ["2", "4"])])
def test_rivals_run_on_two_gpus_and_on_four_where_they_are(monkeypatch, place, gpus, sizes):
    started: list[list[str]] = []

    class Program:
        stdout = ("4 ranks  DDP  meshwright 10 tokens/s   torch 5 tokens/s   ratio 2\n",)
        returncode = 0

        def __init__(self, command, **_):
            started.append(command)

        __enter__, __exit__ = (lambda self: self), (lambda *_: None)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(rivals.subprocess, "Popen", Program)
    assert dict(rivals.run(place))["DDP on 4/ratio"] == 2
    command = started[0]
    at = command.index("--ranks") + 1
    assert command[at : command.index("--pairs")] == sizes
