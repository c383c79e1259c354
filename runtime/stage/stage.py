"""One pipeline stage on one rank: runs its blocks forward, and backward block by block.

Each block has its own autograd graph: its inputs are leaves, whose gradients are those of the
outputs of earlier blocks. So parameters can be gathered for one block at a time, gradients sent off
as soon as a block's are complete, and a block recomputed or its backward split, without hooks.
"""

from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import Call, StageProgram
from meshwright.codegen.passes.halves import Turns, add
from meshwright.codegen.sharded.places import reads_place
from meshwright.forms.retention import decided, retention
from meshwright.forms.running import SyncRun
from meshwright.ir.errors import PlanError
from meshwright.ir.torch_modes import is_watched
from meshwright.ir.torch_private import run_backward
from meshwright.runtime.capture.calls import CapturedCalls, CaptureSlot
from meshwright.runtime.capture.recorder import LaunchRecorder
from meshwright.runtime.stage.chain import Chain, ChainBlock, Gate, chains_of
from meshwright.runtime.stage.keeping import FormRuns, Keeper
from meshwright.runtime.stage.kept_halves import HalvesKeeper, scripts_of
from meshwright.runtime.stage.split import WeightWork, backward_input
from meshwright.runtime.stage.stage_tape import Output, StageTape

Taking = Generator[None, None, dict[str, Tensor]]
"""Pauses where a collective has begun; ends with what it has made."""
Before = Callable[[int, Sequence[int]], None]
"""Called with a block and those whose parameters may be fetched while it runs."""


class BlockModule(nn.Module):
    """A block with the parameters and buffers that it reads; shared ones are the same objects."""

    def __init__(self, call: Call, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.call = call
        self.tensors = [tensors[name] for name in call.params]
        """Its parameters and buffers, in the order of the call."""
        for name, tensor in zip(call.params, self.tensors, strict=True):
            attribute = name.replace(".", "_")
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(attribute, tensor)
            else:
                self.register_buffer(attribute, tensor)

    def forward(
        self, comm: Comm, *inputs: Tensor, keeper: Keeper | HalvesKeeper | None = None
    ) -> tuple[Tensor, ...]:
        run = self.call.run if keeper is None else keeper.run
        return run(comm, *self.tensors, *inputs)


class StageModule(nn.Module):
    """A stage's blocks. Parameters are the tensors that blocks read; `sync` keeps them."""

    def __init__(
        self,
        program: StageProgram,
        comm: Comm,
        tensors: Mapping[str, Tensor],
        sync: SyncRun,
        autocast: torch.dtype | None = None,
        prefetch: int = 0,
        recorder: LaunchRecorder | None = None,
    ) -> None:
        """`recorder`: of calls, which are replayed then."""
        super().__init__()
        self.program, self.comm, self.sync = program, comm, sync
        self._blocks = tuple(BlockModule(call, tensors) for call in program.calls)
        self.blocks = nn.ModuleList(self._blocks)
        self._tensors = dict(tensors)
        self.autocast, self._prefetch = autocast, prefetch
        self._tapes: dict[int, StageTape] = {}
        self._chains = chains_of(program)
        saving = {i: call for i, call in enumerate(program.calls) if call.saved and not call.whole}
        self._scripts = {i: scripts_of(call) for i, call in saving.items()}
        scripts = (script for several in self._scripts.values() for script in several)
        self._runs = FormRuns(comm.device, scripts)
        self.loss_scale: Tensor | float = 1.0
        """The gradient of the loss with regard to itself."""
        self.reduce_early = True
        """No further batch adds to this step's gradients."""
        read = {name for call in program.calls for name in call.inputs}
        self._relayed = {value.name for value in program.receives} & {
            value.name for value in program.sends
        }
        self._kept_names = read | self._relayed
        self._sent = {value.name for value in program.sends} | {program.loss}
        self._received = {value.name for value in program.receives}
        self._through = _first_readers(program)
        """Call -> what the stage has received that no call before it reads."""
        self._captured: CapturedCalls | None = None
        if recorder is not None:
            self._captured = CapturedCalls(self._blocks, comm, self._casts, recorder)
        own = [call for call in program.calls if not reads_place(call)] if recorder else []
        self._replayed = {call.block for call in own}
        """Blocks whose calls are replayed where there is a slot; others run as they are."""
        made = {name for call in own for name in call.outputs}
        self._entering = {name for call in own for name in call.inputs} - made
        """What calls that are replayed read, and none of them makes."""

    @property
    def slots(self) -> int:
        """How many micro-batches in flight have had recordings of their own."""
        return 0 if self._captured is None else self._captured.slots

    def forget_recordings(self) -> None:
        """Calls are recorded anew, as numbers of Python that they go by are others now."""
        if self._captured is not None:
            self._captured.forget()

    def totals(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local summands of one micro-batch."""
        return self._plain(self.program.totals, values)

    def forward(
        self,
        microbatch: int,
        values: Mapping[str, Tensor],
        keep: bool = True,
        whole: bool = False,
        last: bool = False,
    ) -> dict[str, Tensor]:
        """The stage's sends and its loss, from what it received, its inputs and the totals.

        With `keep`, what the backward of this micro-batch needs is kept; with `whole`, all of it.
        `last`: the step has no later forward.
        """
        return made_of(self.forward_turns(microbatch, values, keep, whole, last))

    def forward_turns(
        self,
        microbatch: int,
        values: Mapping[str, Tensor],
        keep: bool = True,
        whole: bool = False,
        last: bool = False,
    ) -> Taking:
        """`forward`, so that another stage may work while this one waits for a collective."""
        env = dict(values)
        tape = StageTape(whole=whole)
        if keep and self._captured is not None and not is_watched():
            tape.slot = self._captured.take()
        for value in self.program.receives:
            if keep and value.requires_grad:
                env[value.name] = tape.leaves[value.name] = (
                    env[value.name].detach().requires_grad_(True)
                )
        env |= self._plain(self.program.prelude, env)
        if tape.slot is not None:
            self._enter(env, tape, tape.slot)
        order = range(len(self.program.calls))
        for index, call in enumerate(self.program.calls):
            ahead = self._ahead(order, index)
            if index in self._chains:
                yield from self._forward_chain(self._chains[index], env, tape, keep)
            elif not call.follows:
                self._forward_call(index, call, env, tape, keep, ahead)
            if keep:
                self.sync.after_forward(index, last)
        if keep:
            self._tapes[microbatch] = tape
        wanted = [value.name for value in self.program.sends]
        found = {name: env[name].detach() for name in wanted}
        if self.program.loss:
            found[self.program.loss] = _alone(env[self.program.loss].detach())
        # The next micro-batch of a slot writes over what this one has made there.
        return found if tape.slot is None else {name: x.clone() for name, x in found.items()}

    def _enter(self, env: dict[str, Tensor], tape: StageTape, slot: CaptureSlot) -> None:
        """What calls read that others have made is copied to where they read it."""
        for name in sorted(self._entering & env.keys()):
            self._enter_one(name, env, tape, slot)

    def _enter_one(
        self, name: str, env: dict[str, Tensor], tape: StageTape, slot: CaptureSlot
    ) -> None:
        assert self._captured is not None
        env[name] = self._captured.enter(slot, name, env[name])
        if name in tape.leaves:
            tape.leaves[name] = env[name]

    def _plain(self, call: Call | None, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs a call that needs no gradient."""
        if call is None:
            return {}
        tensors = [self._tensors[name] for name in call.params]
        with torch.no_grad():
            outputs = call.run(self.comm, *tensors, *(values[name] for name in call.inputs))
        return dict(zip(call.outputs, outputs, strict=True))

    def _forward_call(
        self,
        index: int,
        call: Call,
        env: dict[str, Tensor],
        tape: StageTape,
        keep: bool,
        ahead: Sequence[int],
    ) -> None:
        again = self._runs_again(index, tape)
        graph = keep and not again
        inputs = [env[name] for name in call.inputs]
        if keep and index in self._scripts and not tape.whole:
            tape.keepers[index] = self._keeper(index)
        opened = _Opened(self.sync.before_forward, self.sync.close, index, ahead)
        slot = tape.slot if call.block in self._replayed else None
        if slot is not None:
            assert self._captured is not None
            with opened:
                outputs = self._captured.forward(index, slot, inputs, graph=graph)
        else:
            with opened, torch.set_grad_enabled(graph), self._casts():
                outputs = self._blocks[index](self.comm, *inputs, keeper=tape.keepers.get(index))
        found = []
        for name, output in zip(call.outputs, outputs, strict=True):
            differs = output.requires_grad if graph else self._differs(index, inputs, output)
            env[name] = leaf = output.detach()
            if keep and differs:
                leaf.requires_grad_(True)
                if name in self._kept_names:
                    tape.leaves[name] = leaf
                if graph:
                    found.append(Output(name, get_gradient_edge(output), output.dtype))
            if tape.slot is not None and slot is None and name in self._entering:
                self._enter_one(name, env, tape, tape.slot)
        tape.outputs.append(found)
        still = keep and not any(env[name].requires_grad for name in call.outputs)
        if still:
            tape.still.add(index)
            tape.again.discard(index)
        if keep and again and not still:
            tape.values |= {n: env[n] for n in call.inputs if n not in tape.leaves}
        for name in call.drop:
            if name not in self._sent:
                env.pop(name, None)

    def _keeper(self, index: int) -> Keeper | HalvesKeeper:
        """For one run of a call of whose ops the plan says what becomes of what they make."""
        call, scripts = self.program.calls[index], self._scripts[index]
        if call.code.halves is None:
            return Keeper(call, scripts[0], self._runs)
        return HalvesKeeper(call, call.code.halves, scripts, self._runs)

    def _halved(self, index: int, tape: StageTape, keep: bool) -> HalvesKeeper | None:
        """That of a call of a chain."""
        if not keep or index not in self._scripts or tape.whole:
            return None
        found = self._keeper(index)
        assert isinstance(found, HalvesKeeper)
        return found

    def _runs_again(self, index: int, tape: StageTape) -> bool:
        """Whether a call is to run again as one for the backward of a micro-batch."""
        call = self.program.calls[index]
        if not call.whole or tape.whole:
            return False
        form = decided(retention(call.whole), call.block, "")
        if form.build is not None:
            raise PlanError(
                f"retention {call.whole} decides for all of {call.block} as one on a form of what "
                "single ops make; nearest is 'full', or 'keep'"
            )
        if form.again:
            tape.again.add(index)
        return form.again

    def _forward_chain(
        self, indices: range, env: dict[str, Tensor], tape: StageTape, keep: bool
    ) -> Turns:
        calls = [self.program.calls[index] for index in indices]
        links = [
            ChainBlock(
                i, call, self._blocks[i].tensors, self._runs_again(i, tape),
                self._halved(i, tape, keep),
            )
            for i, call in zip(indices, calls, strict=True)
        ]  # fmt: skip
        gate = self._gate(self.sync.before_forward, indices)
        chain = Chain(links, self.comm, gate, self._casts, keep=keep)
        later = self.program.calls[indices.stop :]
        wanted = {name for call in later for name in call.inputs} | self._sent
        yield from chain.forward(env, wanted)
        env |= chain.made()
        for name in (name for call in calls for name in call.outputs if name in env):
            if keep and chain.differs(name):
                env[name].requires_grad_(True)
                if name in self._kept_names:
                    tape.leaves[name] = env[name]
        tape.outputs += [[] for _ in calls]
        if keep:
            tape.chains[indices.start] = chain
        for name in (name for call in calls for name in call.drop if name not in self._sent):
            env.pop(name, None)

    def _backward_chain(
        self, indices: range, tape: StageTape, gradients: MutableMapping[str, Tensor], last: bool
    ) -> Turns:
        chain = tape.chains.pop(indices.start)
        arriving = {}
        for name in (name for i in indices for name in self.program.calls[i].outputs):
            found = self._arriving(name, chain.dtype(name), tape, gradients)
            if found is not None:
                arriving[name] = found
        order = range(indices.stop - 1, -1, -1)
        before = self.sync.before_backward
        gate = self._gate(before, order, lambda index: self.sync.after_backward(index, last))
        yield from chain.backward(arriving, gate)
        for name, more in chain.entering().items():
            if name in tape.leaves:
                add(tape.leaves[name], more)
        for index in indices:
            self._forget(index, tape, gradients)

    def _gate(
        self, before: Before, order: range, passed: Callable[[int], None] | None = None
    ) -> Gate:
        """Around calls that are entered in this order."""

        def enter(index: int) -> None:
            before(index, self._ahead(order, order.index(index)))

        return Gate(enter, self.sync.close, passed or (lambda index: None))

    def _differs(self, index: int, inputs: Sequence[Tensor], output: Tensor) -> bool:
        """Whether an output that was made without a graph will have a gradient."""
        parameters = self._blocks[index].parameters()
        differs = output.is_floating_point() or output.is_complex()
        return differs and any(x.requires_grad for x in (*inputs, *parameters))

    def recompute(self, microbatch: int) -> None:
        """Makes again what the forward did not keep, in its order; the backward need not."""
        tape = self._tapes[microbatch]
        chained = {index for own in self._chains.values() for index in own}
        for index in range(len(self.program.calls)):
            keeper = tape.keepers.get(index)
            if index in tape.chains:
                tape.chains[index].recompute()
            elif index in tape.again and index not in chained:
                with self._open(index, ()):
                    tape.outputs[index] = self._recompute(index, tape)
            elif keeper is not None and keeper.runs_again:
                with self._open(index, ()):
                    keeper.prepare(self.comm, self._casts)
        tape.whole = True

    def backward(
        self, microbatch: int, gradients: MutableMapping[str, Tensor], last: bool
    ) -> dict[str, Tensor]:
        """Adds the parameters' gradients; returns those of what the stage received. Of `gradients`
        it drops each as its block is through."""
        return made_of(self.backward_turns(microbatch, gradients, last))

    def backward_turns(
        self, microbatch: int, gradients: MutableMapping[str, Tensor], last: bool
    ) -> Taking:
        """`backward`, so that another stage may work while this one waits for a collective."""
        tape = self._begin_backward(microbatch, gradients)
        calls = range(len(self.program.calls))[::-1]
        order = [index for index in calls if index not in tape.still]
        ends = {own[-1]: own for own in self._chains.values()}
        for index in calls:
            if index in ends:
                yield from self._backward_chain(ends[index], tape, gradients, last)
            if any(index in own for own in ends.values()):
                continue
            if index not in tape.still:
                position = order.index(index)
                with self._open(index, self._ahead(order, position)):
                    self._prepare(tape, order[position : position + 2])
                    self._differentiate(index, tape, gradients)
            self._forget(index, tape, gradients)
            tape.keepers.pop(index, None)
            self.sync.after_backward(index, last)
        del self._tapes[microbatch]
        found = self._received_gradients(tape)
        if self._captured is not None:
            if tape.slot is not None:
                found = {name: x.clone() for name, x in found.items()}
            self._captured.give_back(tape.slot)
        return found

    def _differentiate(self, index: int, tape: StageTape, gradients: Mapping[str, Tensor]) -> None:
        """Adds the gradients of a call's parameters, and those of its inputs to their leaves."""
        if tape.slot is not None and self.program.calls[index].block in self._replayed:
            self._replay_backward(index, tape, tape.slot, gradients)
            return
        edges, arriving = self._starts(index, tape, gradients)
        if edges:
            run_backward(edges, arriving)
        if self._captured is not None:
            self._captured.saw(index)

    def _replay_backward(
        self, index: int, tape: StageTape, slot: CaptureSlot, gradients: Mapping[str, Tensor]
    ) -> None:
        assert self._captured is not None
        call = self.program.calls[index]
        again = index in tape.again
        arriving = {}
        for number, output in enumerate(slot.made(index, graph=not again)):
            gradient = self._arriving(call.outputs[number], output.dtype, tape, gradients)
            if gradient is not None:
                arriving[number] = gradient
        if not arriving:
            return
        inputs = self._inputs_again(index, tape) if again else []
        found = self._captured.backward(index, slot, inputs, arriving, again=again)
        for name, gradient in zip(call.inputs, found, strict=True):
            if gradient is not None and name in tape.leaves:
                add(tape.leaves[name], gradient)

    def backward_input(
        self, microbatch: int, gradients: MutableMapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The input half of `backward`."""
        tape = self._begin_backward(microbatch, gradients)
        calls = range(len(self.program.calls))[::-1]
        order = [index for index in calls if index not in tape.still]
        for index in calls:
            if index in tape.still:
                tape.weights.append((index, None))
                self._forget(index, tape, gradients)
                continue
            position = order.index(index)
            with self._open(index, self._ahead(order, position)):
                self._prepare(tape, order[position : position + 2])
                work = self._halve(index, tape, gradients)
            tape.weights.append((index, work))
            self._forget(index, tape, gradients)
        return self._received_gradients(tape)

    def _halve(
        self, index: int, tape: StageTape, gradients: Mapping[str, Tensor]
    ) -> WeightWork | None:
        """A call's part of `backward_input`; what it starts from is gone before the next call's."""
        edges, arriving = self._starts(index, tape, gradients)
        if not edges:
            return None
        inputs = dict.fromkeys(self.program.calls[index].inputs)
        leaves = [tape.leaves[name] for name in inputs if name in tape.leaves]
        parameters = [p for p in self._blocks[index].parameters() if p.requires_grad]
        return backward_input(edges, arriving, leaves, parameters)

    def backward_weight(self, microbatch: int, last: bool) -> None:
        """The weight half of `backward`."""
        tape = self._tapes.pop(microbatch)
        order = [index for index, work in tape.weights if work is not None]
        for index, work in tape.weights:
            if work is not None:
                with self._open(index, self._ahead(order, order.index(index))):
                    work.run()
            tape.keepers.pop(index, None)
            self.sync.after_backward(index, last)

    def _begin_backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> StageTape:
        tape = self._tapes[microbatch]
        for name, gradient in gradients.items():
            leaf = tape.leaves.get(name)
            if leaf is not None:  # also read inside the stage, or passed on
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return tape

    def _starts(
        self, index: int, tape: StageTape, gradients: Mapping[str, Tensor]
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the block's backward starts, with the gradients that arrive there."""
        again = index in tape.again and not tape.whole
        outputs = self._recompute(index, tape) if again else tape.outputs[index]
        edges, arriving = [], []
        for output in outputs:
            gradient = self._arriving(output.name, output.dtype, tape, gradients)
            if gradient is not None:
                edges.append(output.edge)
                arriving.append(gradient)
        return edges, arriving

    def _arriving(
        self, name: str, dtype: torch.dtype, tape: StageTape, gradients: Mapping[str, Tensor]
    ) -> Tensor | None:
        """The gradient of what a call made, in its dtype; None if none arrives."""
        if name == self.program.loss:
            scale, place = self.loss_scale, self.comm.device
            if isinstance(scale, Tensor):
                return scale.to(place, dtype, copy=True)
            return torch.full((), scale, dtype=dtype, device=place)
        leaf = tape.leaves.get(name)
        gradient = gradients.get(name) if leaf is None else leaf.grad
        return None if gradient is None else gradient.to(dtype)

    def _recompute(self, index: int, tape: StageTape) -> list[Output]:
        call = self.program.calls[index]
        self.comm.recomputing = True
        try:
            with torch.enable_grad(), self._casts():
                outputs = self._blocks[index](self.comm, *self._inputs_again(index, tape))
        finally:
            self.comm.recomputing = False
        return [
            Output(name, get_gradient_edge(output), output.dtype)
            for name, output in zip(call.outputs, outputs, strict=True)
            if output.requires_grad
        ]

    def _inputs_again(self, index: int, tape: StageTape) -> list[Tensor]:
        """What a call read that runs again as one."""
        return [
            tape.leaves[name] if name in tape.leaves else tape.values[name]
            for name in self.program.calls[index].inputs
        ]

    def _prepare(self, tape: StageTape, coming: Sequence[int]) -> None:
        """What the first of the coming blocks did not keep is here again, or made again; what the
        next one has elsewhere is on its way."""
        index, *following = coming
        if index in tape.keepers:
            tape.keepers[index].prepare(self.comm, self._casts)
        for later in following:
            if later in tape.keepers:
                tape.keepers[later].fetch()

    def _forget(self, index: int, tape: StageTape, gradients: MutableMapping[str, Tensor]) -> None:
        """Frees the block's graph and the gradients that it has used."""
        tape.outputs[index] = []
        for name in self.program.calls[index].outputs:
            gradients.pop(name, None)
            if name not in self._received:
                _without_gradient(tape.leaves.pop(name, None))
        for name in self._through.get(index, ()):  # its gradient waits for the others without it
            tape.received[name] = _gradient_of(tape.leaves.pop(name))

    def _received_gradients(self, tape: StageTape) -> dict[str, Tensor]:
        found = {}
        for name in (value.name for value in self.program.receives if value.requires_grad):
            leaf = tape.leaves.pop(name, None)
            found[name] = tape.received.pop(name) if leaf is None else _gradient_of(leaf)
        return found

    def _ahead(self, order: Sequence[int], position: int) -> Sequence[int]:
        """The calls whose parameters may be fetched while the one at `position` runs."""
        return order[position + 1 : position + 1 + self._prefetch]

    def _open(self, index: int, ahead: Sequence[int]) -> "_Opened":
        """The block's parameters are whole within, for its backward."""
        return _Opened(self.sync.before_backward, self.sync.close, index, ahead)

    def _casts(self) -> AbstractContextManager[None]:
        if self.autocast is None:
            return _NOTHING
        device = self.comm.device.type
        return torch.autocast(device, dtype=self.autocast)


def made_of(taking: Taking) -> dict[str, Tensor]:
    """What it makes where nothing else is at work meanwhile."""
    while True:
        try:
            next(taking)
        except StopIteration as over:
            made: dict[str, Tensor] = over.value
            return made


def _first_readers(program: StageProgram) -> Mapping[int, Sequence[str]]:
    """Call -> values with a gradient that come from other stages, of which it is the first reader.
    Those of the first call stay to the end of the backward anyway."""
    first: dict[str, int] = {}
    for index, call in enumerate(program.calls):
        first = dict.fromkeys(call.inputs, index) | first
    found: dict[int, list[str]] = {}
    for value in program.receives:
        if value.requires_grad and first.get(value.name):
            found.setdefault(first[value.name], []).append(value.name)
    return found


def _gradient_of(leaf: Tensor) -> Tensor:
    """That of a leaf which nothing reads any more, zeros if it got none."""
    gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
    _without_gradient(leaf)
    return gradient


def _without_gradient(leaf: Tensor | None) -> None:
    """Lets the gradient of a leaf go, which graphs that read the leaf keep until their parameters
    have theirs."""
    if leaf is not None:
        leaf.grad = None


def _alone(loss: Tensor) -> Tensor:
    """A loss without the table that torch has made it in: the one number of `mse_loss`,
    `smooth_l1_loss` and `binary_cross_entropy` keeps memory for each element of their input."""
    return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss


_NOTHING = nullcontext()


class _Opened:
    """A block's parameters are whole within. As a generator it would cost several times as much."""

    __slots__ = ("_ahead", "_before", "_close", "_index")

    def __init__(
        self, before: Before, close: Callable[[int], None], index: int, ahead: Sequence[int]
    ) -> None:
        self._before, self._close, self._index, self._ahead = before, close, index, ahead

    def __enter__(self) -> None:
        self._before(self._index, self._ahead)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close(self._index)
