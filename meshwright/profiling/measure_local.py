"""Measures this machine as a cluster of CPU processes: arithmetic, memory, Gloo between them."""

import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from meshwright.costmodel.fit.calibrate_links import fit_link
from meshwright.costmodel.fit.fit_compute import KernelTiming, fit_curve
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s, memory_s
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass, OpCurve
from meshwright.ir.errors import MeshwrightError, PlanError
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.heap import keep_freed_memory
from meshwright.ir.profile.profile import CollectiveRecord, GroupShape, Timing
from meshwright.ir.torch_private import all_gather, reduce_scatter
from meshwright.profiling.small_layers import dispatch_s, small_step
from meshwright.runtime.profiling import cpu_probes as kernels
from meshwright.runtime.profiling.cpu_probes import Kernel, seconds_per_call
from meshwright.runtime.profiling.load import BusyLoad

_SMALL, _MIDDLE, _LARGE = 2**10, 2**18, 2**22
_PIECES, _TURNS = 2, 16
"""Of computing before a collective, 1.3 ms of a core in all, and how often they take turns."""
_ALONE_S = 0.15
_SPREAD = 0.25
"""Relative error of collectives that were measured so shortly."""
_FEW_BAND = 0.15
"""Relative error of a curve through two sizes."""
_LOADED_S = 0.6
_LEAST_S = 1e-6
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_TIMEOUT_S = 120.0
_ROUNDS, _MOST_PACKING = 4, 8.0
_Sizes = dict[OpClass, dict[float, float]]


@dataclass(frozen=True, slots=True)
class _Computed:
    """What one process measured of computing."""

    flops: dict[str, float]
    compute: dict[OpClass, float]
    """FLOP/s in float32."""
    attention: dict[tuple[int, int, int], float]
    """(heads, tokens, width) -> seconds in float32, dispatch included."""
    streaming: float
    """Bytes/s of what writes where it reads."""
    memory: _Sizes
    """Bytes -> seconds, dispatch included."""
    matmul: dict[int, float]
    """Edge of a cube -> seconds in float32, dispatch included."""
    flat_s: float
    """Of `kernels.flat_product`, dispatch included."""
    overhead_s: float
    """Of the cheapest op."""
    layers_s: float
    """Of a step of `small_layers`."""


@dataclass(frozen=True, slots=True)
class _TimedTurn:
    """Of some pieces of computing and a collective."""

    wall_s: float
    """That the fastest quarter took."""
    busy_s: float
    """Processor seconds."""

    def seconds(self, piece_s: float, per_core: float) -> float:
        """Of the collective between computing, from which members come at different times and
        with caches that it then finds filled.

        Where processes share cores, what it needs of these is what it takes: one that waits leaves
        its core to others. Else what nobody computes in.
        """
        if per_core > 1.0:
            return max(_LEAST_S, per_core * (self.busy_s - _PIECES * piece_s))
        return max(_LEAST_S, self.wall_s - _PIECES * piece_s)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What one process measured."""

    computed: _Computed
    piece_s: float = 0.0
    """Processor seconds of a piece of computing while all compute and nobody communicates."""
    turns: dict[tuple[str, int, int], _TimedTurn] = field(default_factory=dict)
    """By operation, group size and bytes."""
    sends_s: dict[int, float] = field(default_factory=dict)
    """Bytes -> seconds of a message."""


def measure_local(num_processes: int, *, budget_s: float = 2.4) -> Cluster:
    """`Cluster.local(num_processes)` with measured speeds.

    All processes measure at once, so speeds include what sharing caches and memory costs. Computing
    is told in processor time: a device is a process that has a core of its own (the simulator
    shares cores out), whoever else wants it now.
    It forks, so it must run before this process joins a process group.
    """
    if dist.is_initialized():
        raise PlanError("measure_local must run before torch.distributed is initialised")
    assumed = Cluster.local(num_processes)
    seen = _fork(num_processes, budget_s)
    device = _device(assumed.device_types[0], [process.computed for process in seen])
    link = assumed.nodes[0].link
    if num_processes > 1:
        cores = min(assumed.nodes[0].cores, num_processes)
        link = fit_link(link, _records(seen, num_processes / cores))
    return replace(
        assumed,
        name=f"local:{num_processes}+measured",
        device_types=(device,),
        nodes=(replace(assumed.nodes[0], link=link),),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _device(assumed: DeviceType, seen: list[_Computed]) -> DeviceType:
    flops = {name: _mean([s.flops[name] for s in seen]) for name in _DTYPES}
    memory = {
        op_class: {n: _mean([s.memory[op_class][n] for s in seen]) for n in sizes}
        for op_class, sizes in seen[0].memory.items()
    }
    large = {c: max(sizes) / sizes[max(sizes)] for c, sizes in memory.items()}
    compute = {c: _mean([s.compute[c] for s in seen]) for c in seen[0].compute}
    bandwidth = max(*large.values(), _mean([s.streaming for s in seen]))
    efficiency = {OpClass.MATMUL: 1.0}
    efficiency |= {c: min(1.0, value / flops["float32"]) for c, value in compute.items()}
    efficiency |= {c: value / bandwidth for c, value in large.items()}
    device = replace(
        assumed,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops=flops | {"float16": flops["bfloat16"]},
        efficiency=efficiency,
        overhead_s=_mean([s.overhead_s for s in seen]),
        source="measured",
        reference=f"{len(seen)} processes at once, torch {torch.__version__}, 1 thread each",
    )
    cubes = {n: _mean([s.matmul[n] for s in seen]) for n in seen[0].matmul}
    attention = {shape: _mean([s.attention[shape] for s in seen]) for shape in seen[0].attention}
    device = _with_curves(device, memory, cubes, _mean([s.flat_s for s in seen]))
    device = _with_attention(device, attention)
    return replace(device, overhead_s=dispatch_s(device, _mean([s.layers_s for s in seen])))


def _with_curves(
    device: DeviceType, memory: _Sizes, cubes: dict[int, float], flat_s: float
) -> DeviceType:
    """Small ops run in the cache, large ones do not: curves through the sizes that were measured.

    Memory first: a product leans on the curve of copies.
    """
    measured = {
        op_class: [
            _sample(device, KernelWork(op_class, "float32", 0.0, n), s) for n, s in sizes.items()
        ]
        for op_class, sizes in memory.items()
    }
    for op_class, samples in measured.items():
        middle = sorted(s.work.nbytes for s in samples)[len(samples) // 2]
        start = OpCurve(share=device.efficiency[op_class], cache_bytes=round(middle))
        reference = f"{len(samples)} sizes"
        curve = fit_curve(op_class, samples, device, start, reference=reference)
        device = replace(device, curves={**device.curves, op_class: curve})
    products = [_sample(device, _product(n, n, n), s) for n, s in cubes.items()]
    return _with_products(device, products, flat_s)


def _with_products(device: DeviceType, cubes: list[KernelTiming], flat_s: float) -> DeviceType:
    """A cube's arithmetic outweighs what it moves, a flat product's does not: each in turn tells
    the one from the other."""
    rows, edge = kernels.FLAT
    flat = _product(rows, edge, edge)
    moving_s = memory_s(flat.nbytes, curve_of(OpClass.COPY, device), device)
    start = OpCurve(share=device.efficiency[OpClass.MATMUL])
    for _ in range(_ROUNDS):
        curve = fit_curve(OpClass.MATMUL, cubes, device, start, reference=f"{len(cubes) + 1} sizes")
        device = replace(device, curves={**device.curves, OpClass.MATMUL: curve})
        more_s = flat_s - device.overhead_s - kernel_s(flat, device)
        packing = min(_MOST_PACKING, max(0.0, curve.packing + more_s / moving_s))
        start = replace(curve, packing=packing)
    return replace(device, curves={**device.curves, OpClass.MATMUL: start})


def _with_attention(device: DeviceType, seconds: dict[tuple[int, int, int], float]) -> DeviceType:
    """Two shapes tell the rate, and what queries of few keys take more for each of these: the
    curve's depth. A floor, which a fit would find first, would be a call's, however many queries
    there are."""
    (many_s, many), (few_s, few) = (
        (max(_LEAST_S, took - device.overhead_s) / (4.0 * heads * tokens**2 * width), tokens)
        for (heads, tokens, width), took in sorted(seconds.items(), key=lambda x: -x[0][1])
    )
    each_s = max(0.0, few_s - many_s) / (1 / few - 1 / many)
    flop_s = max(0.1 * many_s, many_s - each_s / many)
    share = min(1.5, 1.0 / (flop_s * device.peak("float32")))
    curve = OpCurve(share=share, depth=each_s / flop_s, band=_FEW_BAND, source="fitted",
                    reference=f"{len(seconds)} sizes")  # fmt: skip
    return replace(device, curves={**device.curves, OpClass.ATTENTION: curve})


def _sample(device: DeviceType, work: KernelWork, seconds: float) -> KernelTiming:
    return KernelTiming(work, seconds, device.overhead_s)


def _product(m: int, n: int, k: int) -> KernelWork:
    nbytes = 4.0 * (m * k + k * n + m * n)
    return KernelWork(OpClass.MATMUL, "float32", 2.0 * m * n * k, nbytes, (Gemm(1, m, n, k),))


def _records(seen: list[_Measured], per_core: float) -> list[CollectiveRecord]:
    """The mean over the processes of what each saw."""
    times: dict[tuple[str, int, int], list[float]] = {}
    for process in seen:
        for key, turn in process.turns.items():
            times.setdefault(key, []).append(turn.seconds(process.piece_s, per_core))
        for nbytes, seconds_of_one in process.sends_s.items():
            times.setdefault(("send", 2, nbytes), []).append(seconds_of_one)
    return [
        CollectiveRecord(
            operation=operation,
            nbytes=nbytes,
            group=GroupShape(size=size, per_node=size),
            groups_at_once=len(seen) // size,
            time=Timing(median_s=_mean(found), spread=_SPREAD, count=len(found)),
        )
        for (operation, size, nbytes), found in sorted(times.items())
    ]


def _fork(num_processes: int, budget_s: float) -> list[_Measured]:
    """What each rank saw; all processes are gone when it returns."""
    context = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(num_processes):
                reader, writer = context.Pipe(duplex=False)
                args = (rank, num_processes, budget_s, store, writer)
                process = context.Process(target=_child, args=args, daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                pipes.append(reader)
            return [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _receive(pipe: Connection, rank: int) -> _Measured:
    if wait([pipe], timeout=_TIMEOUT_S):
        with suppress(EOFError):
            seen = pipe.recv()
            assert isinstance(seen, _Measured)
            return seen
    raise MeshwrightError(f"measuring this machine failed on process {rank}")


def _child(rank: int, count: int, budget_s: float, store: str, writer: Connection) -> None:
    # More than one thread in a forked child hangs where the parent has used OpenMP.
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    dist.barrier()
    computed = _compute(budget_s)
    dist.barrier()
    found = _communicate(rank, count, computed) if count > 1 else _Measured(computed)
    if count > 2 and rank < 2:
        found.sends_s[_SMALL] = _latency_under_load(rank)
    elif count > 2:
        seconds_per_call(kernels.matmul(torch.float32)[0], _LOADED_S)
    dist.barrier()
    writer.send(found)
    writer.close()
    dist.barrier()


def _speed(kernel: Kernel, budget_s: float) -> float:
    call, work = kernel
    return work / seconds_per_call(call, budget_s)


def _compute(budget_s: float) -> _Computed:
    """Everything but communication."""
    sizes = len(kernels.ELEMENTS)
    count = len(_DTYPES) + len(kernels.EDGES) + len(kernels.ATTENTIONS) + 2 + 6 * sizes + 4
    share = budget_s / count
    memory: _Sizes = {}
    with torch.no_grad():
        flops = {name: _speed(kernels.matmul(t), share) for name, t in _DTYPES.items()}
        compute = {c: _speed(kernel, share) for c, kernel in kernels.compute_kernels()}
        for elements in kernels.ELEMENTS:
            for op_class, (call, nbytes) in kernels.memory_kernels(elements):
                memory.setdefault(op_class, {})[nbytes] = seconds_per_call(call, share)
        cubes = {
            n: seconds_per_call(kernels.matmul(torch.float32, n)[0], share) for n in kernels.EDGES
        }
        flat_s = seconds_per_call(kernels.flat_product(), share)
        attention = {s: seconds_per_call(kernels.attention(s), share) for s in kernels.ATTENTIONS}
        streaming = _speed(kernels.streaming(kernels.ELEMENTS[-1]), share)
    chain, links = kernels.dispatch()
    return _Computed(
        flops=flops, compute=compute, attention=attention, streaming=streaming, memory=memory,
        matmul=cubes, flat_s=flat_s, overhead_s=seconds_per_call(chain, share) / links,
        layers_s=seconds_per_call(small_step(), share),
    )  # fmt: skip


def _communicate(rank: int, count: int, computed: _Computed) -> _Measured:
    """Collectives of pairs and of all, and messages within pairs, everybody at once."""
    pairs = [dist.new_group([i, i + 1]) for i in range(0, count - 1, 2)]
    pair = pairs[rank // 2] if rank // 2 < len(pairs) else None
    everybody = dist.new_group()
    load = BusyLoad(torch.device("cpu"))
    dist.barrier()
    found = _Measured(computed, seconds_per_call(load.unit, _ALONE_S))
    for nbytes, calls in ((_SMALL, 20), (_MIDDLE, 10), (_LARGE, 5)):
        # With two processes the pair is everybody.
        for size, group in {2: pair, count: everybody}.items():
            dist.barrier()
            if group is None:
                continue
            for operation, call in _calls(nbytes, size, group).items():
                found.turns[operation, size, nbytes] = _turn(call, load)
        if pair is not None:
            data = torch.ones(nbytes // 4)
            found.sends_s[nbytes] = _timed(partial(_ping_pong, data, rank), calls) / 2
    dist.barrier()
    return found


def _turn(call: Callable[[], object], load: BusyLoad) -> _TimedTurn:
    """Every rank takes as many."""
    times, busy = [], process_time()
    for _ in range(_TURNS):
        start = perf_counter()
        for _ in range(_PIECES):
            load.unit()
        call()
        times.append(perf_counter() - start)
    return _TimedTurn(sorted(times)[_TURNS // 4], (process_time() - busy) / _TURNS)


def _calls(nbytes: int, size: int, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    part = torch.ones(nbytes // 4 // size)
    whole = torch.zeros(len(part) * size)
    counts = [len(part) // size] * size
    sent, received = part[: sum(counts)], torch.zeros(sum(counts))
    return {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group).wait(),
        "all_gather": partial(all_gather, whole, part, group),
        # With sizes, as tokens of experts travel.
        "all_to_all": partial(dist.all_to_all_single, received, sent, counts, counts, group=group),
    }


def _latency_under_load(rank: int) -> float:
    """Seconds of a small message between two processes while the others compute.

    A process that waits for a message gives up its core, and gets one back only when the scheduler
    lets it: with more processes than cores that is most of the latency.
    """
    data = torch.zeros(_SMALL // 4)
    calls = 40
    start = perf_counter()
    for _ in range(calls):
        _ping_pong(data, rank)
    return (perf_counter() - start) / (2 * calls)


def _ping_pong(data: torch.Tensor, rank: int) -> None:
    if rank % 2 == 0:
        dist.send(data, rank + 1)
        dist.recv(data, rank + 1)
    else:
        dist.recv(data, rank - 1)
        dist.send(data, rank - 1)


def _timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of the fastest quarter; every rank makes the same number of calls."""
    times = []
    for _ in range(calls + 1):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return sorted(times[1:])[calls // 4]
