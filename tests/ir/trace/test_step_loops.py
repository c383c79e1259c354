"""Loops over tokens become one operator where all rounds are alike, and stay elsewhere; either way
the graph computes what the module does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.graph.graph import Graph, Ref
from meshwright.ir.graph.recurrence import RUN, RecurrentStep, StepCall, step_of
from meshwright.ir.graph.step_work import pages_of_part, work_of_step
from meshwright.ir.ops import facts
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from tests.ir.trace.same_gradients import check_same
from tests.told_memory import told_of_held

BATCH, LENGTH, WIDTH = 3, 2 * RUN + 5, 4
RECURRENCE = "meshwright.recurrence.default"


def stacked(x: Tensor, decay: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = state * decay + x[:, i]
        made = state.tanh()
        found.append(made)
    made = torch.stack(found, dim=1)
    return made + state[:, None] + i


def kept(x: Tensor, decay: Tensor) -> Tensor:
    """A list that is looked into."""
    state, found = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = state * decay + x[:, i]
        found.append(state)
    return torch.stack(found[1:], dim=1)


def written(x: Tensor, decay: Tensor) -> Tensor:
    """Two states, in two places; matrices; parts of parts; values in a narrower place."""
    most, sums = x[:, 0].detach(), x.new_zeros(x.shape[0], WIDTH, WIDTH)
    out, of_most = (
        x.new_zeros(*x.shape),
        x.new_zeros(*x.shape[::2], x.shape[1], dtype=torch.float32),
    )
    for t in range(x.shape[1]):
        part = x[:, t, :]
        sums = sums * decay.exp() + part.unsqueeze(-1) * x[:, t, None, :-1].sum(-1, keepdim=True)
        most = torch.maximum(most, part) * 0.9
        of_most[:, :, t] = most.to(out.dtype)
        out[:, t] = (sums @ part[..., None]).squeeze(-1)
    return out + of_most.mT + most.unsqueeze(1)


def again(x: Tensor, decay: Tensor) -> Tensor:
    """No tokens: the same is done again and again (Sinkhorn's iterations, of hyper-connections)."""
    x = (x * decay).exp()
    for _ in range(RUN + 2):
        x = x / (x.sum(-1, keepdim=True) + 1e-3)
        x = x / (x.sum(-2, keepdim=True) + 1e-3)
    return x


def layers(x: Tensor, decay: Tensor) -> Tensor:
    """Products with a weight, which ranks may split, stay products."""
    weight = decay[:, None] * decay
    for _ in range(5):
        x = (x @ weight).tanh()
    return x


def by_chunk(x: Tensor, decay: Tensor) -> Tensor:
    """Chunks of tokens, of which the last is shorter: it stays as it is."""
    width, length = 4, x.shape[1]
    state, found = torch.zeros_like(x[:, 0]), []
    for i in range((length + width - 1) // width):
        first = i * width
        end = min(first + width, length)
        many = end - first
        part = x[:, first:end] * decay**many + state[:, None] * x[:, first:end, :1]
        found.append(part / many)
        state = state + part.sum(1)
    made = torch.cat(found, dim=-2)
    return made + state[:, None]


def by_whole_chunk(x: Tensor, decay: Tensor) -> Tensor:
    """As xLSTM does: states are left in a tensor with a place for the last one, too; the number of
    the last chunk is read afterwards, and the list's name is another thing's."""
    width, chunks = 4, x.shape[1] // 4
    states, sums = (
        x.new_zeros(x.shape[0], (chunks + 1) * WIDTH),
        x.new_zeros(x.shape[0], chunks + 1),
    )
    state, found = torch.zeros_like(x[:, 0]), []
    for at in range(0, chunks):
        end = (at + 1) * width
        states[:, at * WIDTH : (at + 1) * WIDTH] = state
        sums[:, at] = state.sum(-1)
        found.append(x[:, at * width : end].tanh() * state[:, None])
        state = state * decay + x[:, at * width : (1 + at) * width, :].sum(1)
    states[:, -WIDTH:] = state
    found = torch.cat(found, 1)
    return found + states.mean(-1)[:, None, None] * sums.exp().sum(-1)[:, None, None] * end


def overlapping(x: Tensor, decay: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, :4]), []
    for i in range(x.shape[1] - 4):
        state = state * decay + x[:, i : i + 4]
        found.append(state)
    return torch.cat(found, dim=1)


def counted_up(x: Tensor, decay: Tensor) -> Tensor:
    """Its parts are known by a number that each round adds to."""
    state, found, first = torch.zeros_like(x[:, :4]), [], 0
    for _ in range(x.shape[1] // 4):
        state = state * decay + x[:, first : first + 4]
        first = first + 4
        found.append(state)
    return torch.cat(found, dim=1)


def looked_into(x: Tensor, decay: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = state * decay + x[:, i]
        found.append(state)
    return torch.cat(found, dim=-1) + found[2].sum()


def of_neighbour(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = state * decay + x[:, i - 1]
        out[:, i] = state
    return out


def by_number(x: Tensor, decay: Tensor) -> Tensor:
    i = 2  # so that the name has a value before the loop
    x = x * i
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = state * decay + x[:, i] * i
        out[:, i] = state
    return out


def in_place(x: Tensor, decay: Tensor) -> Tensor:
    """What is read has been written before, by another name."""
    out = 2 * x
    same, state = out, torch.zeros_like(x[:, 0])
    for i in range(x.shape[1]):
        out[:, i] = state + 1
        state = state * decay + same[:, i].clone()
    return out


def without_gradient(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = (state * decay).detach() + x[:, i]
        out[:, i] = state
    return out


def told_afterwards(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        new = x[:, i] * decay
        state = state + new
        out[:, i] = state
    return out + new[:, None]


def broadcast(x: Tensor, decay: Tensor) -> Tensor:
    state, out = x.new_zeros(1, 1), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = state * decay.sum() + x[:, i].sum()
        out[:, i] = state
    return out


def half_of_it(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1] - 1):
        state = state * decay + x[:, i]
        out[:, i] = state
    return out


def growing(x: Tensor, decay: Tensor) -> Tensor:
    state, out = x[:, :1] * decay, torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = torch.cat([state, x[:, i].unsqueeze(1)], 1)
        out[:, i] = state.sum(1)
    return out


class Counting:
    """Something that counts how often it is called."""

    calls = 0

    def scale(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


def with_calls(x: Tensor, decay: Tensor) -> Tensor:
    state, out, counting = torch.zeros_like(x[:, 0]), torch.zeros_like(x), Counting()
    for i in range(x.shape[1]):
        state = state * decay + counting.scale(x[:, i])
        out[:, i] = state
    return out * counting.calls


def gated(x: Tensor, state: Tensor, *, decay: Tensor, low: float = 0.0, **kwargs: float) -> Any:
    """As xLSTM's step: sizes are looked at, and all is made by functions that only compute."""
    batch, width = x.shape
    if state.shape != (batch, width):
        raise ValueError(f"a state of {state.shape} is none of {x.shape}")
    state = kept_part(state, decay) + x * max(1.0, kwargs.get("scale", 1.0)) + low
    return torch.tanh(state), (state, torch.exp(-state))


def kept_part(state: Tensor, decay: Tensor) -> Tensor:
    if state.dtype == torch.float64:
        return state * decay
    return state.to(decay.dtype) * decay


def by_function(x: Tensor, decay: Tensor) -> Tensor:
    state, other, found, more = torch.zeros_like(x[:, 0]), x[:, 0], [], {"scale": 1.5}
    for i in range(x.shape[1]):
        part, beside = x[:, i], x[:, i, :1]
        made, (state, other) = gated(part, state, decay=decay, low=0.25, **more)
        found.append(made * other + beside)
    return torch.stack(found, dim=-2) + state[:, None]


SEEN = list[int]()


def counted(x: Tensor, state: Tensor) -> Tensor:
    SEEN.append(1)
    return x + state


def looked_up(x: Tensor, state: Tensor) -> Tensor:
    return x + state * len(SEEN)


def put_aside(x: Tensor, state: Tensor, found: Any) -> Tensor:
    found.append(x)
    return x + state


def added_up(x: Tensor, state: Tensor) -> Tensor:
    state += x
    return state


def indirectly(x: Tensor, state: Tensor) -> Tensor:
    return counted(x, state) / 2


def hidden(x: Tensor, state: Tensor) -> Tensor:
    return x + state.detach()


def again_and_again(x: Tensor, state: Tensor, left: int = 2) -> Tensor:
    return again_and_again(x, state, left - 1) if left else x + state


def stopped(x: Tensor, state: Tensor) -> Tensor:
    with torch.no_grad():
        return x + state


def by_counting(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = counted(x[:, i], state * decay)
        out[:, i] = state
    return out


def by_looking_up(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = looked_up(x[:, i], state * decay)
        out[:, i] = state
    return out


def by_putting_aside(x: Tensor, decay: Tensor) -> Tensor:
    state, out, aside = torch.zeros_like(x[:, 0]), torch.zeros_like(x), list[Tensor]()
    for i in range(x.shape[1]):
        state = put_aside(x[:, i], state * decay, aside)
        out[:, i] = state
    return out + len(aside)


def by_adding_up(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = added_up(x[:, i], state * decay)
        out[:, i] = state
    return out


def by_another(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = indirectly(x[:, i], state * decay)
        out[:, i] = state
    return out


def by_hiding(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = hidden(x[:, i], state * decay)
        out[:, i] = state
    return out


def by_asking_itself(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = again_and_again(x[:, i], state * decay)
        out[:, i] = state
    return out


def by_stopping(x: Tensor, decay: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for i in range(x.shape[1]):
        state = stopped(x[:, i], state * decay) * x[:, i]
        out[:, i] = state
    return out


class Steps(nn.Module):
    """Something computed token by token."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.decay = nn.Parameter(torch.linspace(0.2, 0.9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x * self.scale, self.decay).square().mean()


def _traced(compute: Callable[[Tensor, Tensor], Tensor]) -> tuple[Graph, Steps, Tensor]:
    torch.manual_seed(0)
    model, x = Steps(compute).double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    return trace(model, (x,)), model, x


@pytest.mark.parametrize(
    ("compute", "found"),
    [(stacked, 1), (kept, 1), (written, 1), (again, 1),
     (by_chunk, 1), (by_whole_chunk, 1), (looked_into, 1), (overlapping, 0), (counted_up, 0),
     (layers, 0), (of_neighbour, 0),
     (by_number, 0), (in_place, 0),
     (without_gradient, 0), (told_afterwards, 0), (broadcast, 0), (half_of_it, 0), (growing, 0),
     (with_calls, 0), (by_function, 1), (by_counting, 0), (by_looking_up, 0),
     (by_putting_aside, 0), (by_adding_up, 0), (by_another, 0), (by_hiding, 0),
     (by_asking_itself, 0), (by_stopping, 0)],
)  # fmt: skip
def test_a_loop_is_a_recurrence_only_if_all_rounds_are_alike(
    compute: Callable[[Tensor, Tensor], Tensor], found: int
) -> None:
    graph, model, x = _traced(compute)
    assert [op.target for op in graph.ops].count(RECURRENCE) == found
    wanted = model(x)
    of_wanted = torch.autograd.grad(wanted, [model.scale, model.decay], allow_unused=True)
    made = interpret(graph, model, (x,))[graph.loss]
    of_made = torch.autograd.grad(made, [model.scale, model.decay], allow_unused=True)
    assert torch.allclose(made, wanted, rtol=1e-13)
    check_same(of_made, of_wanted, rtol=1e-11, atol=1e-8)
    assert torch.stack([x[0]]).shape == (1, *x[0].shape) and "range" not in globals()
    assert torch.cat([x, x], -1).shape == (*x.shape[:-1], 2 * WIDTH)


class Chunks(nn.Module):
    """Decays of chunks are the module's own, as MiniMax's are."""

    width: int

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.decays = nn.Parameter(torch.linspace(0.2, 0.9, 4)[:, None])
        self.slope = nn.Buffer(torch.linspace(0.5, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for i in range((x.shape[1] + self.width - 1) // self.width):
            first = i * self.width
            end = min(first + self.width, x.shape[1])
            many = end - first
            part = x[:, first:end] * self.decays[-many:] + state[:, None]
            state = state * torch.exp(-self.slope * many) + part.sum(1)
            found.append(part)
        found = torch.cat(found, dim=1)
        return (found * found).mean()


@pytest.mark.parametrize("length", [32, 37])
def test_rounds_may_read_tensors_and_numbers_of_their_module(length: int) -> None:
    torch.manual_seed(0)
    model, x = Chunks().double(), torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
    graph = trace(model, (x,))
    assert [op.target for op in graph.ops].count(RECURRENCE) == 1
    made, wanted = interpret(graph, model, (x,))[graph.loss], model(x)
    assert torch.allclose(made, wanted, rtol=1e-13)
    of_made, of_wanted = (torch.autograd.grad(y, [model.decays])[0] for y in (made, wanted))
    assert torch.allclose(of_made, of_wanted, rtol=1e-11)
    assert not any("unbind" in op.target for op in graph.ops) or length % 4


def test_ranks_have_samples_or_channels_and_no_part_of_what_a_step_mixes() -> None:
    graph, _, _ = _traced(stacked)
    (op,) = (op for op in graph.ops if op.target == RECURRENCE)
    make = facts(op.target).rule
    rule = make(op, graph) if make else None
    assert rule is not None
    batch, channels = (dim[0] for dim in rule.inputs[0])
    assert rule.inputs == (
        ((batch,), (channels,)),
        ((batch,), ("steps",), (channels,)),
        ((channels,),),
    )
    assert rule.outputs == (((batch,), (channels,)), (("steps",), (batch,), (channels,)))
    assert rule.split == {batch, channels}
    graph, _, _ = _traced(written)
    (op,) = (op for op in graph.ops if op.target == RECURRENCE)
    make = facts(op.target).rule
    rule = make(op, graph) if make else None
    assert rule is not None
    assert len(rule.split) == 1  # matrices are summed over
    assert all(dims[0] == (next(iter(rule.split)),) for dims in rule.outputs)


def test_flops_and_kernels_are_those_of_all_steps() -> None:
    graph, _, _ = _traced(stacked)
    (op,) = (op for op in graph.ops if op.target == RECURRENCE)
    step = step_of(str(op.arg("step")))
    assert step_of(step.text()) == step
    assert op.flops >= LENGTH * 3 * BATCH * WIDTH
    assert op.flops % (LENGTH * BATCH * WIDTH) == 0
    count = facts(op.target).one_by_one
    assert count
    forward, back = count(op, graph)
    assert forward.kernels == LENGTH * 4  # three of the step, one that leaves a place
    assert back.kernels == LENGTH * 4  # two factors, one of them spread, and a tanh


def test_gradients_take_what_each_operand_asks_for() -> None:
    """A factor that is spread over others has a gradient as large as the result, summed later; a
    term of a sum has the result's own."""
    step = [
        StepCall("aten.mul.Tensor", (("self", Ref("0")), ("other", Ref("1"))), "2"),
        StepCall("aten.add.Tensor", (("self", Ref("2")), ("other", Ref("0")), ("alpha", 1)), "3"),
        StepCall("aten.unsqueeze.default", (("self", Ref("3")), ("dim", 0)), "4"),
        StepCall("aten.squeeze.dim", (("self", Ref("4")), ("dim", 0)), "5"),
    ]
    text = RecurrentStep(("float32", "float32"), tuple(step), ("5",)).text()
    whole, row = 4 * 8 * 16, 4 * 16
    forward, back = work_of_step(text, ((8, 16), (16,)), 1, (1,))
    assert forward == (2, 3, (2 * whole + row) + 3 * whole, 0)  # one view takes the part
    of_state, of_row = 2 * whole + row, 2 * whole + whole + (whole + row)
    twice = 3 * whole  # the state is read twice: its gradients are added
    assert back == (4, 3, of_state + of_row + twice + 4 * row, 0)


def test_rows_of_a_part_that_lie_far_apart_are_pages_to_look_up() -> None:
    """Of 2,048 channels, each with a row of 16 values per token, as Mamba's states have."""
    assert pages_of_part((2048, 128, 16), 1, 4) == 2048  # 8 KB from row to row
    assert pages_of_part((2048, 16, 16), 1, 4) == 512  # four rows on a page
    assert pages_of_part((128, 2048, 16), 0, 4) == 1  # side by side
    step = [
        StepCall("aten.mul.Tensor", (("self", Ref("1")), ("other", Ref("0"))), "3"),
        StepCall("aten.add.Tensor", (("self", Ref("3")), ("other", Ref("2")), ("alpha", 1)), "4"),
    ]
    text = RecurrentStep(("float32",) * 3, tuple(step), ("4",)).text()
    for pages in (2048, 256):
        forward, back = work_of_step(text, ((2048, 16),) * 3, 1, (pages, pages))
        assert forward.pages == (2 * 2048 - 512 if pages == 2048 else 0)
        assert back.pages == (2048 - 512 if pages == 2048 else 0)  # of the state's gradient
        assert forward.on_part(0.5).times(3).pages == 1.5 * forward.pages


@pytest.mark.parametrize("compute", [stacked, again])
def test_memory_is_what_is_held(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    """States before each run, and what the steps of one run make."""
    torch.manual_seed(0)
    x = 0.1 * torch.randn(64, 128, WIDTH)
    assert told_of_held(Steps(compute), (x,), "fp32") == pytest.approx(1.0, abs=0.005)


def test_states_may_begin_in_a_narrower_type() -> None:
    """As in copies in bfloat16, whose states are sums in float32."""

    def wider(x: Tensor, decay: Tensor) -> Tensor:
        state, out = x.new_zeros(x.shape[0], WIDTH), torch.zeros_like(x)
        for i in range(x.shape[1]):
            state = state * decay.float() + x[:, i].float()
            out[:, i] = state
        return out

    model, x = Steps(wider).bfloat16(), torch.randn(BATCH, LENGTH, WIDTH).bfloat16()
    graph = trace(model, (x,))
    assert [op.target for op in graph.ops].count(RECURRENCE) == 1
    assert torch.equal(interpret(graph, model, (x,))[graph.loss], model(x))
