"""Parameters that the loss gives no gradient rest, as in PyTorch, whatever optimizer and layout."""

import torch

from meshwright.ir.trace.trace import trace
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.nets import CHOICES, Net, data, graph_of, plan_for
from meshwright.testing.spawn import alone, run_ranks

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5),
}


class Branching(Net):
    """Also a layer under no_grad, one whose gradient is zero, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.silent, self.zero, self.frozen = (torch.nn.Linear(8, 8).double() for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x, y):
        with torch.no_grad():
            x = x + self.silent(x)
        return super().forward(self.frozen(x) + 0 * self.zero(x), y)


def plain(kind):
    model = Branching()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for seed in (0, 2):
        optimizer.zero_grad()
        (model(*data(seed)) + model(*data(seed + 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def by_jobs():
    found = {}
    for kind, make in OPTIMIZERS.items():
        for name in CHOICES:
            model = Branching()
            job = compile_job(
                model,
                branching_plan(name),
                optimizer=make(model.parameters()),
                max_grad_norm=0.5,
                graph=graph_of(branching_plan(name)),
            )
            for seed in (0, 2):
                job.eval(data())
                job.accumulate(data(seed))
                job.accumulate(data(seed + 1))
                job.apply()
            job.sync_to()
            found[kind, name] = {n: p.detach() for n, p in model.named_parameters()}
            job.close()
    return found


PLANS = {}


def branching_plan(name):
    if name not in PLANS:
        PLANS[name] = plan_for(Branching, 2, **CHOICES[name])
    return PLANS[name]


def test_only_what_the_loss_reaches_is_trained():
    for name in CHOICES:
        branching_plan(name)
    wanted = {kind: alone(plain, kind) for kind in OPTIMIZERS}
    start = dict(Branching().named_parameters())
    rest = [n for n in start if n.split(".")[0] in ("silent", "frozen", "detached", "unused")]
    for found in run_ranks(2, by_jobs, timeout_s=300):
        for (kind, name), state in found.items():
            for key, value in wanted[kind].items():
                torch.testing.assert_close(
                    state[key], value, rtol=1e-8, atol=1e-10, msg=f"{name} {key}"
                )
            assert all(torch.equal(state[key], wanted[kind][key]) for key in rest)
            assert not torch.equal(state["zero.weight"], start["zero.weight"])  # it decays


def test_a_graph_says_what_gets_a_gradient():
    tensors = trace(Branching(), data()).tensors.values()
    trained = {t.fqn.split(".")[0] for t in tensors if t.requires_grad and t.fqn}
    assert trained == {"layers", "head", "zero"}
