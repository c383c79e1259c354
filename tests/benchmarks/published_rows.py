"""Rows of published measurements, as tests write them."""

from benchmarks.published.rows import Context, read_row

LLAMA_8B = {"name": "Llama3.1 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
            "ffn": 14336, "vocab": 128256, "act": "swiglu"}  # fmt: skip


GPT3 = {"name": "GPT-3", "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "vocab": 51200}


def raw(**changes):
    """A row of GPT-3 on 64 GPUs, with parts replaced."""
    row = {
        "hardware": {"gpu": "A100-SXM4-80GB", "gpus": 64, "gpus_per_node": 8},
        "model": GPT3,
        "parallel": {"tp": 8, "pp": 8, "dp": 1, "vpp": 3},
        "batch": {"gbs": 64, "mbs": 1, "seq": 2048},
        "recompute": "full",
        "measured": {"step_time_s": 18.13},
    }
    return {**row, **changes}


def row(context="megatron runs", **changes):
    return read_row(raw(**changes), 0, Context("table", {}, context))


def llama(**changes):
    return row("torchtitan", **{"model": LLAMA_8B, "parallel": {"dp": 64, "zero": 3}, **changes})


def internevo(gpus, group):
    changed = {"parallel": {"dp": gpus, "zero": 1, "zero1_group": group},
               "hardware": {"gpu": "A100-SXM4-80GB", "gpus": gpus},
               "model": LLAMA_8B, "batch": {"gbs": gpus, "mbs": 1, "seq": 2048}}  # fmt: skip
    return row("internevo", **changed)
