"""Head and tail of the report: how to read it, and how often the tables were looked at."""

HEAD = """# Published training runs, predicted

`python -m benchmarks.published REPORT_DIR -o docs/results/published.md` predicts every row that can
be predicted with the project's cost model and presets, and counts the others with their reasons.
Constants come from the calibration part of the tables, data sheets, sources of the stacks or stated
assumptions; none is fitted to these rows. Errors are relative; above zero means predicted too slow
or too large. `rank` is Spearman's correlation of step times.
"""

LOG = """## Looks at the reported rows

The tables were evaluated about 22 times while this was written. No constant was searched for the
least error, but these mechanisms were added or changed after errors had been seen:

1. First look, nothing changed before it: Korthikanti 1.7 % median, SC21 2.2 %, torchtitan 21 %,
   InternEvo 21 %, Alpa 13 %, nanotron 34 %.
2. nanotron: the bandwidth measured over all nodes of a job is no property of two of them: groups
   of fewer nodes get the usual bandwidth for their number (a table of the calibration part). That
   table and two calibration runs at tp 16 and 32 (then 14 % and 85 % too slow, now 6 % and 1 % too
   fast) say that rings lose it per step, not per byte; the reported rows got slightly worse by it.
3. Kernels of whole runs take 1.25 times those timed alone, from one calibration run on H100 SXM5.
   It was extended to the other Hopper parts after torchtitan's rows had been seen 21 % too fast.
   A100: products at the median of five PyTorch tests of the calibration part instead of at an
   inference library's kernels (1.08), looked up after torchtitan's and InternEvo's A100 rows had
   been seen too fast; it made Korthikanti and SC21 worse (4.8 % and 4.7 %) and was kept.
4. torchtitan: eager RMSNorm is made of several operators; float8 casts before it gathers; looped
   schedules have two stages per rank.
5. nanotron: the CPU's time per layer, from counts of its calls and assumed costs per call, once
   rows had shown a floor per layer; ZeRO-1's flattened gather buffers, which the table's own column
   of static memory shows; inputs that the version before the rerun keeps.
6. InternEvo: flash attention 1; copies in its optimizer step.
7. Alpa: nothing overlaps under ZeRO-3; rows whose strategy is not stated are left out.

Known to be off:
- nanotron with both tensor and pipeline parallelism and small micro-batches: measured times per
  layer grow with tp alone (9, 15, 24 and 50 ms at tp 2, 4, 8 and 16), whatever the width. No public
  source that was read explains it, so these rows are predicted far too fast. With tensor
  parallelism alone the floor is 4.5 ms a layer, of which the counted calls give 2 to 3.
- The old bench's times were taken with a profiler on; only its memory is meant to be compared.
- Float8 with row-wise scales uses the rate of tensor-wise ones. MI300X has no calibrated whole run.
- Context parallelism over 4 and 8 ranks lacks what ring attention's steps cost.
- InternEvo's broadcasts, one per rank of a large ZeRO group, cost more than the all-gather here.
- Experts (Alpa): GShard's dispatch products and how the compiler shards experts are not modelled.
- Convolutional networks, BERT, Transformer-XL and BART are not modelled; their rows are left out.
"""
