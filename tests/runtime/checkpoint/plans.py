"""Plans that checkpoints go between."""

from meshwright.testing.handmade import plan_of
from tests.runtime.small_jobs import gpipe, stage

PLANS = {
    "one": plan_of((stage(0, 4, (0,), shares=(12,)),), gpipe(1, 2), 2),
    "zero3": plan_of((stage(0, 4, (0, 1, 2, 3), shares=(3,) * 4, zero=3),), gpipe(1, 2), 2),
    "hsdp1": plan_of(
        (stage(0, 4, (0, 1, 2, 3), mesh={"dp_replicate": 2, "dp_shard": 2, "tp": 1},
               shares=(3,) * 4, zero=1),), gpipe(1, 2), 2),
    "pipeline": plan_of(
        (stage(0, 1, (0, 1, 2), shares=(2, 2, 2), zero=2), stage(2, 4, (3,), shares=(6,))),
        gpipe(2, 4), 4),
}  # fmt: skip
