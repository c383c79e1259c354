"""NVIDIA V100 of 16 GB, SXM2."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import BESIDE, INFINIBAND_EDR, PCIE_3, curve, link
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.774, wide_share=0.865, floor_s=5.33e-06, depth=143, split_depth=497,
                 quantum=0.0385, small_tile=0.994, droop=0.001, band=0.0798, source="fitted",
                 reference="200 GEMMs of DeepBench (da81ba7); cut to large products")
CONVOLUTION = OpCurve(share=0.782, wide_share=0.917, floor_s=1.24e-05, depth=0.1, split_depth=892,
                      quantum=0.296, small_tile=0.869, droop=0.001, band=0.424, source="fitted",
                      reference="395 kernels of DeepBench (da81ba7)")
NVLINK2_CURVES = (
    curve("all_reduce", 2, (0, 24), (1048576, 70.14), (1073741824, 4.761e+04)),
    curve("all_reduce", 3, (0, 28), (1048576, 75.04), (4194304, 148.9),
          (1073741824, 3.171e+04)),
    curve("all_reduce", 4, (0, 28), (1048576, 67.26), (4194304, 142.1), (8388608, 177.8),
          (1073741824, 1.887e+04)),
    curve("all_reduce", 5, (0, 32), (1048576, 90.87), (1073741824, 4.622e+04)),
    curve("all_reduce", 6, (0, 32), (1048576, 99.48), (8388608, 333.3),
          (1073741824, 3.912e+04)),
    curve("all_reduce", 7, (0, 32), (1048576, 81.74), (8388608, 271), (16777216, 365.7),
          (1073741824, 2.116e+04)),
    curve("all_reduce", 8, (0, 32), (1048576, 79.93), (8388608, 237.9), (16777216, 273.8),
          (1073741824, 1.397e+04)),
)
NVLINK2 = link("nvlink2", 150, 8, efficiency=0.89, launch_s=2e-5, step_s=2e-6, source="fitted",
               fit_error=0.1, **BESIDE,
               reference="all-reduce of 2-8 GPUs from 1 MiB on: vTrain (f8dda84); below an "
                         "assumption",
               curves=NVLINK2_CURVES)
VOLTA_RUNS = ((2018, 1.05),)
"""With it a layer of BERT-Large on V100 takes what the calibration part has: 64 TFLOP/s forward and
backward at 128 sequences of 128 (mli/transformers-benchmarks, micro_bench.ipynb)."""
PRESET = Preset(memory_gb=16, bandwidth_gb_s=900, fp64=7.8, fp32=15.7, half=125, bf16=15.7,
                in_runs=VOLTA_RUNS, attention_in_runs=VOLTA_RUNS,
                processors=80, cache_mb=6, copy=0.85,
                reference="SXM2 data sheet; no bf16 tensor cores: 9.4-10.3 TFLOP/s measured",
                matmul=MATMUL, convolution=CONVOLUTION, link=NVLINK2, network=INFINIBAND_EDR,
                bus=PCIE_3, capability="7.0", reported="V100", accelerator="V100")
