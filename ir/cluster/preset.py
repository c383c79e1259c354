"""The record of a device: what its file in `ir/presets` says, and the device type made of it.

Peaks, memory and bandwidth are the vendors' as collected by stas00/ml-engineering (commit 744d01e),
cli99/llm-analysis (d841e40) and ai-dynamo/aiconfigurator (095f58a). float64 peaks, counts of
multiprocessors and cache sizes are from memory of the vendors' architecture papers.
"""

from dataclasses import dataclass, replace

from meshwright.ir.cluster.device import DeviceType, Link, OpClass, OpCurve, Source
from meshwright.ir.cluster.links import ETHERNET_25G, PCIE_4, Network

_MIB = 2**20
_KERNEL_S = 2.5e-6
"""A kernel between others on a GPU: the floor that fits to H100, H200 and B200 matmuls find."""
_DISPATCH_S = 6e-6
"""Assumption: eager PyTorch dispatches 100k-200k ops a second."""
_RESERVED = round(1.5 * 2**30)
"""Assumption: CUDA context, NCCL, cuBLAS."""
_COPY_SHARE = 0.82
"""Of the bandwidth: copies reach 0.73 (A100) to 0.90 (RTX 4090) in device-benchmarks (commit
7ccc883); the median, for devices that it does not list."""
_CACHE_GAIN = 2.0
"""Assumption: values that fit into the cache move twice as fast."""
_FP8_SHARE = 0.88
"""Float8 products reach less of their peak than bf16 ones do: 71 against 80 % on H100 SXM (maximum
achievable matmul, stas00/ml-engineering); H200 and B200 lie close. Curves hold bf16's share."""
_OF_COPY = {
    OpClass.ELEMENTWISE: 1.0,
    OpClass.TRANSCENDENTAL: 1.0,
    OpClass.COPY: 1.0,
    OpClass.NORMALIZATION: 0.8,
    OpClass.REDUCTION: 0.8,
    OpClass.GATHER: 0.5,
}
"""Bandwidth of a class relative to copies; all but copies are assumptions."""
WINOGRAD = 2.25
"""In tiles of 2 x 2 (Lavin and Gray 2016), as cuDNN does it for PyTorch. XLA's runs of Wide-ResNet
on V100 show none of it (benchmarks.published.wresnet)."""
_CONVOLUTION = 0.88
"""Of a matmul's share: V100 reaches 0.78 in convolutions alone and 0.89 in products alone."""
_IN_TRAINING = 0.76
"""Float32 convolutions in PyTorch's training over those timed alone: over the layers of ResNet-50
and VGG-16 on V100 in PipeDream's profiles (msr-fiddle/pipedream) forward is then 9 % too fast
and backward 7 % too slow."""
_TURNING = 1.2
"""ResNet-18, 50 and 101, ResNeXt-101, VGG-19 and MobileNetV2 in mixed precision on RTX 3090 (timm,
results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv): NCHW takes 0.9 to 1.9 times longer
than copying explains, 1.2 times at the median."""


Rates = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A device and the machine that it usually is in; peaks are dense TFLOP/s."""

    memory_gb: float
    bandwidth_gb_s: float
    fp64: float
    fp32: float
    half: float
    bf16: float | None = None
    """As `half` if not given."""
    tf32: float | None = None
    """None: it has no tensor cores for float32."""
    fp8: float = 0.0
    fp8_share: float = _FP8_SHARE
    processors: int
    """Streaming multiprocessors."""
    cache_mb: float
    """Of the last level."""
    copy: float | None = None
    """Share of the bandwidth that copies reach."""
    copy_from: str = "copies measured by device-benchmarks"
    copy_source: Source = "fitted"
    matmul: OpCurve
    """Matrix products."""
    convolution: OpCurve | None = None
    """None: as far from its products as V100's are."""
    attention: float = 0.0
    """Share of the half-precision peak at long sequences, of FlashAttention 2; 0: half of what
    matmuls reach."""
    attention_backward: float = 1.15
    """Of its 5 products over the 2 of the forward, which run at a higher rate: figure 5 there."""
    rows: Rates = ()
    """(alignment, FLOP/s) of products whose rows are not aligned; empty: taken for aligned."""
    batches: Rates = ()
    """The same of batched products."""
    in_runs: tuple[tuple[int, float], ...] = ()
    """(year of libraries, factor) of products, in whole runs over kernels timed alone."""
    narrow_in_runs: tuple[tuple[int, float], ...] = ()
    """The same of products of 8-bit floats; empty: as of others."""
    attention_in_runs: tuple[tuple[int, float], ...] = ()
    """The same of attention."""
    link: Link = PCIE_4
    """Between the devices of a node."""
    network: Network = ETHERNET_25G
    """Between nodes."""
    other_links: tuple[Link, ...] = ()
    """More that cluster files may name."""
    bus: Link = PCIE_4
    """To the host's memory."""
    reported: str
    """Words of the name that CUDA reports; of several presets the longest that is in it, and then
    the one whose memory is nearest."""
    capability: str = ""
    """Of CUDA, by NVIDIA's list of GPUs, or AMD's name of the architecture; empty: not known."""
    accelerator: str = ""
    """Its name in the catalogue of SkyPilot; empty: none is known."""
    reference: str = "data sheet"
    evidence: str = ""
    """File of `ir/presets/measured` that its curves were compared with (`ir.profile.evidence`);
    empty: no machine of ours has measured it."""

    def device(self, name: str, convolution: OpCurve) -> DeviceType:
        """Makes the device type; `convolution` has the form where the preset has none."""
        peaks = {"float64": self.fp64, "float32": self.fp32, "float16": self.half,
                 "bfloat16": self.bf16 or self.half, "tf32": self.tf32 or self.fp32}  # fmt: skip
        if self.fp8:
            peaks["float8_e4m3fn"] = self.fp8_share * self.fp8
        curves = self._compute_curves(convolution) | self._memory_curves()
        return DeviceType(
            name=name,
            kind="cuda",
            memory_bytes=round(self.memory_gb * 2**30),  # marketed GB are GiB on these parts
            memory_bandwidth_bytes_per_s=self.bandwidth_gb_s * 1e9,
            peak_flops={dtype: value * 1e12 for dtype, value in peaks.items()},
            efficiency={op_class: min(1.0, curve.share) for op_class, curve in curves.items()},
            curves=curves,
            processors=self.processors,
            overhead_s=_DISPATCH_S,
            reserved_bytes=_RESERVED,
            capability=self.capability,
            source="datasheet",
            reference=self.reference,
        )

    def _memory_curves(self) -> dict[OpClass, OpCurve]:
        copy = self.copy or _COPY_SHARE
        return {
            op_class: OpCurve(
                share=copy * part,
                cache_share=_CACHE_GAIN * copy * part,
                # Half of it: what is read and written competes with what came before.
                cache_bytes=round(self.cache_mb * _MIB / 2),
                floor_s=_KERNEL_S,
                band=0.15 if self.copy and part == 1.0 else 0.3,
                source=self.copy_source if self.copy and part == 1.0 else "assumption",
                reference=self.copy_from if self.copy else "",
            )
            for op_class, part in _OF_COPY.items()
        }

    def _compute_curves(self, convolution: OpCurve) -> dict[OpClass, OpCurve]:
        matmul = replace(self.matmul, row_rates=self.rows, batched_row_rates=self.batches,
                         sustained=self.in_runs, narrow_sustained=self.narrow_in_runs)  # fmt: skip
        share = self.attention or 0.5 * matmul.share
        return {
            OpClass.MATMUL: matmul,
            OpClass.ATTENTION: OpCurve(
                share=share,
                # Without tensor cores' formats the unfused kernels run, as far from the peak.
                wide_share=0.5 * (matmul.wide_share or matmul.share),
                floor_s=2 * _KERNEL_S,
                depth=200.0,  # half the rate at 200 keys: figure 4 there, 512 against 16k
                backward=self.attention_backward,
                sustained=self.attention_in_runs,
                band=0.3,
                reference="FlashAttention 2; see above" if self.attention else "",
            ),
            OpClass.CONVOLUTION: self._convolution(matmul, convolution),
            OpClass.RECURRENT: OpCurve(
                share=0.3 * matmul.share,
                wide_share=0.3 * (matmul.wide_share or matmul.share),
                floor_s=1e-4,
                band=0.6,
            ),
        }

    def _convolution(self, matmul: OpCurve, form: OpCurve) -> OpCurve:
        timed = self.convolution
        if timed is None:
            share = _CONVOLUTION * matmul.share
            timed = replace(form, share=share, wide_share=share, source="assumption",
                            reference="V100's, as far from its products")  # fmt: skip
        assert timed.wide_share is not None
        wide = timed.wide_share * (1.0 if self.tf32 else _IN_TRAINING)
        cores = self.tf32 is not None or self.half > 4 * self.fp32
        return replace(
            timed,
            # Without tensor cores half precision is a format of storage.
            sustained=self.in_runs,
            share=timed.share if cores else wide * self.fp32 / self.half,
            wide_share=wide,
            winograd=WINOGRAD,
            turning=_TURNING if cores else 0.0,
        )
