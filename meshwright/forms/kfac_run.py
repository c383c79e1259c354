"""K-FAC around a form that sums gradients: factors of layers go to who preconditions with them as
forward and backward go on, bases are made and sent, gradients become what these make of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.around import AroundRun
from meshwright.forms.factors import (
    GRADIENTS,
    READ,
    Base,
    LayerFactors,
    Tapped,
    Window,
    base_size,
    message_size,
)
from meshwright.forms.flat import BUCKET_BYTES, buckets, sum_over_copies
from meshwright.forms.kfac_layout import KfacSettings
from meshwright.forms.placing import ALL
from meshwright.forms.running import Lines, Peers, Samples, SyncRun, SyncState
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import reduce_scatter_uneven, start_uneven_gather

Named = tuple[LayerFactors, int]
"""A factor: its layer, and its number there."""
Owned = tuple[LayerFactors, int]
"""A layer, and the rank that owns it."""


class _Together:
    """Layers whose factors go in one message each way."""

    def __init__(self, owned: Sequence[Owned], ranks: int) -> None:
        self.layers = [layer for layer, _ in owned]
        self._owners = [owner for _, owner in owned]
        self._ranks = ranks
        self.first = min(layer.weight.owner for layer in self.layers)
        self.last = max(layer.weight.calls[-1] for layer in self.layers)
        """Calls after whose backward, and forward, nothing more is seen."""
        self.left = [READ, GRADIENTS]
        """Factors that have not gone in this step."""

    def sizes(self, factors: Sequence[int]) -> list[int]:
        """Values of their message for each rank."""
        found = [0] * self._ranks
        for layer, owner in zip(self.layers, self._owners, strict=True):
            found[owner] += sum([message_size(layer.dims[factor]) for factor in factors])
        return found


@dataclass(frozen=True, eq=False)
class _Sum:
    """Sums of factors on their way."""

    together: _Together
    factors: Sequence[int]
    mine: Tensor
    work: Waitable


class KfacRun(AroundRun):
    """Owners of layers precondition their gradients; without owners every rank does all of them."""

    def __init__(
        self, inner: SyncRun, owned: Sequence[Owned], lines: Lines, told: KfacSettings, *,
        shared_out: bool,
    ) -> None:  # fmt: skip
        """`owned`: layers owner by owner; `shared_out`: whether they have different ones."""
        super().__init__(inner)
        self._lines, self._told = lines, told
        alone = Peers("dp", None, 1, 0)
        self._peers = lines.shards if shared_out else alone
        """Among whom layers are shared out."""
        self._workers = lines.copies if shared_out else lines.replicas
        """Who preconditions the same layers."""
        self._layers = [layer for layer, _ in owned]
        self._by_path = {layer.path: layer for layer in self._layers}
        self._mine = [layer for layer, owner in owned if owner == self._peers.coordinate]
        self._tensors = {held.param.fqn: held.tensor for held in inner.held}
        by_slot = {layer.weight: (layer, owner) for layer, owner in owned}
        parts = buckets(list(by_slot), BUCKET_BYTES)
        inside = [[pair for slot, pair in by_slot.items() if slot in part] for part in parts]
        self._groups = [_Together(pairs, self._peers.size) for pairs in inside]
        factors: list[Named] = [(layer, n) for layer in self._mine for n in (READ, GRADIENTS)]
        dims = [layer.dims[n] for layer, n in factors]
        makers = told.makers(dims, self._workers.size).of
        self._makers: Mapping[Named, int] = dict(zip(factors, makers, strict=True))
        self._works: list[_Sum] = []
        self._tapped: set[LayerFactors] = set()
        """Layers that have been seen in the forward that runs, or ran last."""
        self._read: dict[int, list[LayerFactors]] = {}
        """By the call that reads them."""
        for layer in self._layers:
            for call in layer.weight.calls:
                self._read.setdefault(call, []).append(layer)
        self._steps = 0
        self._sees = False

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        super().begin(batch, next_batch)
        self._sees = self._told.is_due("factor_update_steps", self._steps)
        for group in self._groups:
            group.left = [READ, GRADIENTS]
        for layer in self._layers:
            if any(layer.counts):  # of a step that did not end
                layer.clear()

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        super().before_forward(call, ahead)
        self._tapped.difference_update(self._read.get(call, ()))

    def tap(self, path: str, made: Tensor, read: Tensor, window: Window) -> Tensor:
        layer = self._by_path.get(path)
        if layer is None or not self._sees or not (torch.is_grad_enabled() and made.requires_grad):
            return made
        layer.see_read(read.detach(), window)
        self._tapped.add(layer)
        seen = partial(layer.see_gradient, window=window)
        found: Tensor = Tapped.apply(made, seen)  # type: ignore[no-untyped-call]
        return found

    def after_forward(self, call: int, last: bool) -> None:
        super().after_forward(call, last)
        for group in self._groups if last and self._sees else ():
            # What runs again has seen nothing yet.
            if group.last == call and self._tapped.issuperset(group.layers):
                self._start(group, (READ,))

    def after_backward(self, call: int, last: bool) -> None:
        super().after_backward(call, last)
        for group in self._groups if last and self._sees else ():
            if group.first == call:
                self._start(group, group.left)

    def arrived(self) -> Sequence[Tensor]:
        """No gradient is what is stepped with before all are preconditioned."""
        return ()

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        for group in self._groups if self._sees else ():
            self._start(group, group.left)
        self._collect(keep=0)
        if self._told.is_due("inv_update_steps", self._steps):
            self._make_bases()
        self._precondition()
        self._steps += 1
        self._sees = False

    # Factors.

    @torch.no_grad()
    def _start(self, group: _Together, factors: Sequence[int]) -> None:
        """Sums of what all have seen begin to go."""
        if not factors:
            return
        if self._workers.size == 1:  # else what has come is summed once more
            self._collect(keep=1)
        group.left = [n for n in group.left if n not in factors]
        sizes = group.sizes(factors)
        flat = self._packed([(layer, n) for layer in group.layers for n in factors])
        recorder, peers = self._lines.recorder, self._peers
        if peers.group is None:
            what = self._what(self._workers, "all_reduce", flat.nbytes)
            start, mine = recorder.mark(), flat
            begun = dist.all_reduce(flat, group=self._workers.group, async_op=True)
            assert begun is not None
            work: Waitable = begun
        else:
            what = self._what(peers, "reduce_scatter", flat.nbytes)
            mine = flat.new_empty(sizes[peers.coordinate])
            start = recorder.mark()
            work = reduce_scatter_uneven(mine, flat, sizes, peers.group)
        self._works.append(_Sum(group, factors, mine, recorder.pending(what, work, start)))

    def _packed(self, factors: Sequence[Named]) -> Tensor:
        sizes = [message_size(layer.dims[n]) for layer, n in factors]
        flat = factors[0][0].sums[0].new_empty(sum(sizes))
        for (layer, n), part in zip(factors, torch.split(flat, sizes), strict=True):
            layer.pack(n, part)
        return flat

    def _collect(self, keep: int) -> None:
        """Takes what has arrived, all but the newest `keep`."""
        rules = self._told.rules(self._steps)
        while len(self._works) > keep:
            one = self._works.pop(0)
            one.work.wait()
            if self._peers.group is not None:
                sum_over_copies(one.mine, self._lines)
            own = [x for x in one.together.layers if x in self._mine]
            taken = [(layer, n) for layer in own for n in one.factors]
            sizes = [message_size(layer.dims[n]) for layer, n in taken]
            for (layer, n), part in zip(taken, torch.split(one.mine, sizes), strict=True):
                if not layer.take(n, part, rules):
                    raise PlanError(
                        "kfac preconditions linear layers and convolutions without groups, and "
                        f"none reads {layer.path}: leave it out of the parameters that kfac has"
                    )

    # Bases.

    def _make_bases(self) -> None:
        rules = self._told.rules(self._steps)
        own = self._workers.coordinate
        for (layer, n), maker in self._makers.items():
            if maker in (ALL, own):
                layer.invert(n, rules)
        for group in self._groups:
            sent = [
                (layer, n) for layer in group.layers if layer in self._mine
                for n in (READ, GRADIENTS) if self._makers[layer, n] != ALL
            ]  # fmt: skip
            if sent:
                self._send_bases(sorted(sent, key=lambda one: self._makers[one]))

    def _send_bases(self, sent: Sequence[Named]) -> None:
        """All who precondition with them get bases that one has made, himself too: what replicas
        have is equal to the bit."""
        peers, eigen = self._workers, self._told.eigen
        counts = [base_size(layer.dims[n], eigen=eigen) for layer, n in sent]
        sizes = [0] * peers.size
        for one, count in zip(sent, counts, strict=True):
            sizes[self._makers[one]] += count
        flat = sent[0][0].sums[0].new_empty(sum(sizes))
        mine = flat.new_empty(sizes[peers.coordinate])
        made = [one for one in sent if self._makers[one] == peers.coordinate]
        own = [base_size(layer.dims[n], eigen=eigen) for layer, n in made]
        for (layer, n), part in zip(made, torch.split(mine, own), strict=True):
            layer.hand_over(n, part)
        what = self._what(peers, "all_gather", flat.nbytes)
        start = self._lines.recorder.mark()
        work = start_uneven_gather(flat, mine, sizes, peers.group)
        self._lines.recorder.pending(what, work, start).wait()
        for (layer, n), part in zip(sent, torch.split(flat, counts), strict=True):
            layer.bases[n] = Base.unpack(part, layer.dims[n], eigen=eigen)

    # Gradients.

    def _precondition(self) -> None:
        """Gradients of this rank's layers become what their factors make of them."""
        rules = self._told.rules(self._steps)
        made: list[tuple[Tensor, Tensor]] = []
        for layer in self._mine:
            weight = self._tensors[layer.path].grad
            bias = None
            if layer.bias is not None:
                bias = self._tensors[layer.bias.param.fqn].grad
            assert weight is not None
            new, new_bias = layer.precondition(weight, bias, rules)
            made.append((weight, new))
            if bias is not None and new_bias is not None:
                made.append((bias, new_bias))
        scale = self._scale(made)
        for gradient, new in made:
            gradient.copy_(new * scale)

    def _scale(self, made: Sequence[tuple[Tensor, Tensor]]) -> float:
        """By which steps are made shorter, so that they are no longer than `kl_clip` allows."""
        limit, lr = self._told.clip(self._steps)
        if not limit:
            return 1.0
        total = torch.zeros((), dtype=torch.float64)
        for gradient, new in made:
            total += float((gradient * new).sum()) * lr**2
        peers = self._peers
        if peers.group is not None:
            total = total.to(self._layers[0].sums[0].device if self._layers else "cpu")
            what = self._what(peers, "all_reduce", total.nbytes)
            with self._lines.recorder.collective(what):
                dist.all_reduce(total, group=peers.group)
        found = abs(float(total))
        return min(1.0, sqrt(limit / found)) if found else 1.0

    def _what(self, peers: Peers, primitive: str, nbytes: int) -> What:
        return What("gradients", self._lines.stage, peers.axis, primitive, nbytes, peers.size)

    # What stays.

    @property
    def kept(self) -> list[Tensor]:
        found = [x for layer in self._layers for x in layer.sums]
        for layer in self._mine:
            found += [x for x in layer.means if x is not None]
            for base in layer.bases:
                found += [x for x in ((base and (base.matrix, base.values)) or ()) if x is not None]
        return [*super().kept, *found]

    def state(self) -> SyncState:
        found: dict[str, object] = {f"inner.{k}": x for k, x in super().state().items()}
        if not self._steps:
            return found
        found["steps"] = self._steps
        for layer in self._mine:
            for n, (mean, base) in enumerate(zip(layer.means, layer.bases, strict=True)):
                own = {"mean": mean}
                if base is not None:
                    own |= {"base": base.matrix, "values": base.values}
                found |= {
                    f"{k} {n} {layer.path}": x.clone() for k, x in own.items() if x is not None
                }
        return found

    def load(self, state: SyncState) -> None:
        own = {k.removeprefix("inner."): x for k, x in state.items() if k.startswith("inner.")}
        super().load(own)
        self._steps = int(state.get("steps", 0))
        for layer in self._mine:
            for n in (READ, GRADIENTS):
                mean, matrix, values = (
                    None if x is None else x.clone()
                    for x in (
                        state.get(f"{k} {n} {layer.path}") for k in ("mean", "base", "values")
                    )
                )
                layer.means[n] = mean
                layer.bases[n] = None if matrix is None else Base(matrix, values)
