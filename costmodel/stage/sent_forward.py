"""What is made and sent of a bucket as the last forward of a step goes on, such as factors of what
layers read: what of it the backward after that finds under way."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from meshwright.costmodel.stage.buckets import Bucket
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.program import IDLE, SCATTER, Do, Overlap, Step, play, run, talk
from meshwright.costmodel.stage.times import BlockTimes
from meshwright.forms.exchange_rows import Rewrite, Send


class SentForward(Protocol):
    """What is needed of a stage."""

    @property
    def groups(self) -> Sequence[FormGroup]: ...
    @property
    def blocks(self) -> Sequence[BlockTimes]: ...
    @property
    def overlap(self) -> Overlap: ...
    def block_forward(self, block: BlockTimes) -> list[Step]: ...
    def work(self, works: Sequence[Rewrite], bucket: Bucket, what: str) -> list[Step]: ...
    def sending(self, group: FormGroup, send: Send, nbytes: float) -> Step: ...


def begun_forward(stage: SentForward) -> list[Step]:
    """Returns what stands for it at the beginning of the last backward: by how much longer the
    forward takes, and what is still on its way. Messages of other stages that come in between, in
    a pipeline, are taken to take no time."""
    own = [
        group for group in stage.groups
        if group.exchange.last_forward or group.exchange.worked_forward
    ]  # fmt: skip
    if not own:
        return []
    plain_s = play([x for block in stage.blocks for x in stage.block_forward(block)])[0]
    steps = list(_forward(stage, own))
    took_s, left = play(steps, IDLE, stage.overlap)
    waits_s = sum([x.seconds for x in steps if x.do is Do.TALK and x.what == "gradients"])
    # Processes that share cores slow down what is computed, and no message.
    found = [run(max(0.0, took_s - plain_s - waits_s), "gradients"), talk(waits_s, "gradients")]
    if left[0]:
        found.append(Step(Do.START, left[0], SCATTER, "gradients"))
    return found


def _forward(stage: SentForward, groups: Sequence[FormGroup]) -> Iterator[Step]:
    for index, block in enumerate(stage.blocks):
        yield from stage.block_forward(block)
        for group in groups:
            for bucket in group.filled.get(index, ()):
                yield from stage.work(group.exchange.worked_forward, bucket, "gradients")
                for send in group.exchange.last_forward:
                    yield stage.sending(group, send, bucket.nbytes)
