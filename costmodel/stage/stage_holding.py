"""What a stage holds on a rank: its memory, put together from its parameters, blocks and forms."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from meshwright.costmodel.memory.leaving import Way
from meshwright.costmodel.memory.memory import training_state
from meshwright.costmodel.memory.memory_group import MemoryGroup
from meshwright.costmodel.memory.stack_bytes import SteppedGroup, stack_bytes
from meshwright.costmodel.memory.stage_memory import BlockMemory, SlotBytes, StageMemory, Stops
from meshwright.costmodel.ops.optimizer import temporary_bytes
from meshwright.costmodel.stage.buckets import BlockParams, Tied, buckets
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.stage_parts import Parts, summed_of
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms.exchange import Exchange
from meshwright.forms.updates import update
from meshwright.ir.stack_memory import StackMemory


def stage_memory_of(
    habits: StackMemory,
    costs: StageCosts,
    parts: Parts,
    held: Sequence[BlockParams],
    sync: Sync,
    ways: tuple[Way, Way] | None = None,
    landings: tuple[int, ...] = (),
) -> StageMemory:
    """Returns what a rank holds of a stage, as a stack with these habits runs it. `ways`: of
    gradients that leave for its host; `landings`: of `landings_of`."""
    shares = [form.exchange.parts("optimizer", form.shards) for form in sync.groups]
    trained = [own.trained_bytes for own in held]
    frozen = [own.frozen_bytes for own in held]
    others = sum(costs.cost.params.values()) - sum(trained) - sum(frozen)
    states = [
        training_state(
            nbytes + still, nbytes, optimizer=part.update, exchange=part.exchange,
            dp_shard=part.lines.shards, frozen_bytes=still,
        )
        for nbytes, still, part in zip(trained, frozen, parts, strict=True)
    ]  # fmt: skip
    rest = _no_layers(costs) if habits.gathers_rest else frozenset()
    stack = stack_bytes(
        habits,
        [SteppedGroup(form.exchange, own.trained_bytes,
                      max([o.largest_trained for o in own.owned], default=0),
                      form.shards, form.lines.ranks)
         for form, own in zip(sync.groups, held, strict=True)],
    )  # fmt: skip
    return StageMemory(
        stack=stack, habits=habits, ways=ways, landings=landings,
        prefetch=sync.prefetch, receives=costs.device.kind == "cpu",
        parameters=others + sum([state.parameters_bytes for state in states]),
        # Where host and device are one memory, what is on the host is there twice.
        optimizer=sum([state.optimizer_bytes for state in states])
        + sum([state.host_bytes for state in states]) * (not costs.device.is_apart),
        host=sum([state.host_bytes for state in states])
        + sum([_landing(own, form.exchange)
               for own, form in zip(held, sync.groups, strict=True)]),
        temporary=_temporary(costs, parts, held, shares) + stack.stepping,
        summed=max([
            sum([int(nbytes / share) for nbytes, share in zip(sizes, shares, strict=True)])
            for _, sizes, _ in summed_of(costs, parts)
        ], default=0),
        border=costs.border_bytes + costs.handed_bytes,
        entry=costs.entry_bytes + costs.taken_bytes,
        border_back=costs.border_back_bytes,
        entry_back=costs.entry_back_bytes,
        shared=costs.shared_bytes,
        sent_as_kept=costs.sent_as_kept,
        blocks=_block_memories(costs, habits.keeps_sent),
        stops=_stops(costs),
        slots=_slots(costs, parts, held) if costs.spot.captured else None,
        groups=tuple(
            MemoryGroup(
                form.exchange, form.buckets or buckets(own.owned, 0), form.gathered,
                _made([o.trained_bytes for o in own.owned], form.exchange),
                _made([o.largest_trained for o in own.owned], form.exchange),
                form.frozen, form.still, form.shards,
                tuple([Tied(ceil(one.nbytes * form.exchange.made), one.readers)
                       for one in own.tied]),
                rest if form.exchange.fetches else frozenset(),
                not costs.device.is_apart,
                _made([o.casting for o in own.owned], form.exchange),
            )
            for form, own in zip(sync.groups, held, strict=True)
        ),
    )  # fmt: skip


def _no_layers(costs: StageCosts) -> frozenset[int]:
    """Blocks that are like no other of the stage, such as an embedding."""
    alike = Counter(block.pattern for block in costs.blocks)
    return frozenset(i for i, block in enumerate(costs.blocks) if alike[block.pattern] == 1)


def _slots(costs: StageCosts, parts: Parts, held: Sequence[BlockParams]) -> SlotBytes:
    gradients = sum([sum(cost.input_bytes) for cost in costs.cost.blocks])
    return SlotBytes(
        gradients + costs.entry_bytes,
        sum([
            ceil(part.exchange.read * own.trained_bytes)
            for part, own in zip(parts, held, strict=True)
        ]),
    )  # fmt: skip


def _stops(costs: StageCosts) -> tuple[Stops, ...]:
    found = []
    for cut, mode in zip(costs.cuts, costs.modes, strict=bool(costs.cuts)):
        ahead = sum(map(bool, cut.phases.sent)) if cut else 0
        back = sum(map(bool, cut.phases.sent_back)) if cut else 0
        found.append(Stops(ahead, ahead * (mode is True), back))
    return tuple(found)


def _temporary(
    costs: StageCosts, parts: Parts, held: Sequence[BlockParams], shares: Sequence[float]
) -> int:
    """What an optimizer's step makes and lets go, at most; state of rows that are stepped alone is
    there beside the whole."""
    found = []
    apart = costs.device.is_apart
    for name in dict.fromkeys([part.update for part in parts]):
        own = [
            (h, n, part.exchange.owns_whole)
            for part, h, n in zip(parts, held, shares, strict=True)
            if part.update == name and not (apart and "optimizer" in part.exchange.hosted)
        ]  # fmt: skip
        if not own:
            continue
        nbytes = sum([int(h.trained_bytes / n) for h, n, _ in own])
        # Owners step whole parameters, other ranks their parts.
        largest = max([ceil(o.largest_trained / (1 if whole else n)) for h, n, whole in own
                       for o in h.owned], default=0)  # fmt: skip
        shapes = [shaped for part in parts if part.update == name for shaped in part.shapes]
        found.append(temporary_bytes(costs.device, name, nbytes, largest, shapes))
    taken = [
        ceil(update(part.update).copies * h.trained_bytes * part.exchange.stepped_share / n)
        for part, h, n in zip(parts, held, shares, strict=True) if part.exchange.stepped
    ]  # fmt: skip
    return max(found, default=0) + sum(taken)


def _landing(own: BlockParams, exchange: Exchange) -> int:
    """Bytes of the host where gradients of some blocks arrive that are added to others."""
    if not exchange.gradients_leave_each:
        return 0
    blocks = 2 if exchange.comes_from_host else 3
    return ceil(blocks * exchange.read * max([o.trained_bytes for o in own.owned], default=0))


def _made(sizes: Sequence[int], exchange: Exchange) -> tuple[int, ...]:
    """Of gradients so large, bytes that blocks make."""
    if exchange.made == 1.0:
        return tuple(sizes)
    return tuple([ceil(nbytes * exchange.made) for nbytes in sizes])


def _known(nbytes: int | None, otherwise: int) -> int:
    return otherwise if nbytes is None else nbytes


def _block_memories(costs: StageCosts, keeps_sent: bool) -> tuple[BlockMemory, ...]:
    """Of each block; those that are alike share one object."""
    on_device = costs.device.is_apart
    known: dict[object, BlockMemory] = {}
    found: list[BlockMemory] = []
    before = 0
    last = len(costs.blocks) - 1
    own = costs.cost
    for index, (cost, saved, entering, read, passing, waiting, released) in enumerate(
        zip(
            own.blocks,
            own.block_saved,
            own.block_entering,
            own.block_read,
            own.block_passing,
            own.block_waiting,
            own.block_released,
            strict=True,
        )
    ):
        if index == last and costs.border_bytes and not keeps_sent:
            cost = cost.left_alone()
        saved -= costs.shared_bytes * (index == 0)
        saved += cost.turned_bytes * (index == 0 and costs.entry_bytes > 0)
        released = max(0, released - costs.shared_bytes * (index == 0))
        entering -= min(entering, costs.shared_bytes * (index == 0))
        # What the last one is given is a message, or the loss.
        given = cost.given_bytes * (index < last)
        key = id(cost), saved, entering, read, passing, before, given, waiting, released
        moved = cost.moved_bytes * on_device
        if key not in known:
            one_op = cost.workspace_bytes + cost.remade_bytes + moved + before
            known[key] = BlockMemory(
                saved=saved,
                # Part of an op's operands and results is what it saves. What is offloaded is there
                # while its block runs, and while the next one does.
                forward=max(
                    saved + moved + cost.freed_bytes,
                    # What enters is there anyway, and an op that reads it counts it again.
                    cost.workspace_bytes * (not cost.forward_bytes),
                    cost.forward_bytes + entering,
                )
                + before
                + passing,
                workspace=one_op - cost.eased_bytes,
                late=cost.late_bytes,
                adding=cost.adding_bytes,
                one_op=one_op,
                halved=cost.halved_bytes - released,
                given=given,
                waiting=waiting,
                halving=_known(cost.halving_bytes, cost.workspace_bytes)
                + released
                + moved
                + before,
                # One that does all begins with what the block was given, which is in `halved`.
                second=_known(
                    cost.second_bytes,
                    max(0, cost.workspace_bytes - cost.eased_bytes - cost.given_bytes),
                )
                + moved
                + before,
                second_adding=cost.second_adding_bytes,
                second_late=cost.second_late_bytes,
                second_read=read,
                remakes=cost.remade_bytes > 0,
            )
        found.append(known[key])
        before = moved
    return tuple(found)
