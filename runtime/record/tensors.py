"""Counts the bytes of all live tensors of a rank during one step, and of which kind they are.

Seen are tensors that PyTorch's operators return, in forward and backward, also inside of those that
are made of others; what a kernel allocates inside itself, or the network library, is not.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.ir.profile.measured import TensorMemory
from meshwright.ir.torch_private import key_of, leaves, unwrapped, wraps_tensors

Kind = Literal["parameters", "gradients", "optimizer", "inputs", "rest", "host"]
"""`host`: in its memory, where that is taken to be another than the device's."""


class TensorTracker:
    """Counts every storage it has seen until it is freed.

    Storages are numbered; a log of (number, change in bytes) tells the peak afterwards, when it is
    known what each was for.
    """

    def __init__(self, resized: Sequence[Tensor] = ()) -> None:
        """`resized`: tensors whose storages grow and shrink, as ZeRO-3's parameters do."""
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._bytes: list[int] = []
        """Per number, now."""
        self._kinds: list[Kind] = []
        self._log: list[tuple[int, int]] = []
        self._resized = [x for x in resized if not wraps_tensors(x)]

    def see(self, made: Iterable[Tensor]) -> None:
        """What an operator returned."""
        for x in self._resized:
            self._see(x)
        for x in made:
            if not wraps_tensors(x):  # what it holds was made before
                self._see(x)

    def label(self, kind: Kind, tensors: Iterable[Tensor | None]) -> None:
        """Says what tensors are for; those not seen before are counted from now on."""
        for x in tensors:
            if x is not None:
                self._kinds[self._see(x)] = kind

    def _see(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        key = key_of(storage)
        known = self._live.get(key)
        if known is None:
            number = len(self._bytes)
            self._bytes.append(0)
            self._kinds.append("rest")
            self._live[key] = number, weakref.ref(storage, lambda _: self._forget(key))
        else:
            number = known[0]
        self._change(number, storage.nbytes())
        return number

    def _change(self, number: int, nbytes: int) -> None:
        if nbytes != self._bytes[number]:
            self._log.append((number, nbytes - self._bytes[number]))
            self._bytes[number] = nbytes

    def _forget(self, key: int) -> None:
        number, _ = self._live.pop(key)
        self._change(number, 0)

    def stop(self) -> None:
        """Forgets what is alive, so that nothing is called when it is freed."""
        self._live.clear()
        self._resized.clear()

    def most(self, kind: Kind) -> int:
        """The most bytes of one kind at once."""
        total = most = 0
        for number, change in self._log:
            total += change * (self._kinds[number] == kind)
            most = max(most, total)
        return most

    def peak(self) -> TensorMemory:
        """The moment with the most bytes on the device."""
        total, most, at = 0, 0, 0
        for index, (number, change) in enumerate(self._log, start=1):
            total += change * (self._kinds[number] != "host")
            if total > most:
                most, at = total, index
        held: dict[Kind, int] = defaultdict(int)
        for number, change in self._log[:at]:
            held[self._kinds[number]] += change
        return TensorMemory(
            peak_bytes=most,
            parameters_bytes=held["parameters"],
            gradients_bytes=held["gradients"],
            optimizer_bytes=held["optimizer"],
            inputs_bytes=held["inputs"],
            rest_bytes=held["rest"],
            host_bytes=self.most("host"),
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its state, without the parameters."""
    return [x for state in optimizer.state.values() for x in tensors_of(state)]


def tensors_of(state: Any) -> list[Tensor]:
    """Those of the state of a parameter."""
    return [held for x in leaves(state) if torch.is_tensor(x) for held in unwrapped(x)]
