"""Small jobs of stages that are written by hand."""

from meshwright.ir.plan.plan import Stage
from meshwright.ir.plan.schedule import Action, Schedule, Work


def stage(first, last, devices, *, mesh=None, shares=(), zero=0, recompute="none", prefetch=0):
    mesh = mesh or {"dp_replicate": 1, "dp_shard": len(devices), "tp": 1}
    patterns = ("first", "middle", "last")
    return Stage(
        first=f"b{first}", last=f"b{last}", mesh=mesh, devices=devices, batch_shares=shares,
        zero=zero, prefetch=prefetch, recompute=dict.fromkeys(patterns, recompute),
    )  # fmt: skip


F, B, BI, BW, *_ = Work


def gpipe(stages, microbatches):
    ms = range(microbatches)
    return Schedule(
        "gpipe",
        tuple(tuple(Action(s, w, m) for w in (F, B) for m in ms) for s in range(stages)),
    )


def split_gpipe(stages, microbatches):
    """Input halves first, weight halves at the very end."""
    ms = range(microbatches)
    return Schedule(
        "split",
        tuple(tuple(Action(s, w, m) for w in (F, BI, BW) for m in ms) for s in range(stages)),
    )
