"""Rows of Nanotron's measurements, as tests write them."""

from benchmarks.published.rows import Context, read_row
from tests.benchmarks.published_rows import raw

SEQ = 4096


SWEEP = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131072,
         "tied": True}  # fmt: skip


def sweep(gpus, **parallel):
    """A row of nanotron's sweep after its fix."""
    made = raw(
        hardware={"gpu": "H100-SXM5-80GB", "gpus": gpus},
        model=SWEEP,
        parallel={"zero": 1, "sp": True, **parallel},
        batch={"gbs": 256, "mbs": 1, "seq": 4096},
        recompute="none",
        after_pp_fix=True,
        usable_throughput=True,
    )
    return read_row(made, 0, Context("nanotron_sweep", {}, "nanotron", rerun=True))


def nanotron(gpus, mbs=1, gbs=256, text="nanotron", model=SWEEP, **parallel):
    """A row of nanotron's sweep, or of another stack that `text` names."""
    made = raw(
        hardware={"gpu": "H100-SXM5-80GB", "gpus": gpus},
        model=model,
        parallel={"sp": True, **parallel},
        batch={"gbs": gbs, "mbs": mbs, "seq": SEQ},
        recompute="none",
        after_pp_fix=True,
    )
    return read_row(made, 0, Context("nanotron_runs", {}, text))
