"""Floating-point operations of one forward call, from shapes; a multiply-add counts 2."""

from collections.abc import Mapping
from operator import attrgetter

import torch

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.inner_flops import inner_flops
from meshwright.ir.graph.op_facts import Args, Shape
from meshwright.ir.ops import facts


def flops(target: str, args: Args, fakes: Mapping[str, torch.Tensor], outputs: list[str]) -> int:
    """Forward flops of one call, as its family counts them, else one per element."""
    known = facts(target)
    if known.flops:
        first = tuple(fakes[outputs[0]].shape) if outputs and outputs[0] else ()
        return known.flops(args, lambda value: _shape(value, fakes), first)
    if known.counted_by_running:
        tensors = [fakes[value.name] for value in args.values() if isinstance(value, Ref)]
        return inner_flops(attrgetter(target)(torch.ops), tensors)
    sizes = [fakes[name].numel() for name in outputs if name]
    sizes += [fakes[v.name].numel() for v in args.values() if isinstance(v, Ref)]
    return max(sizes, default=0)


def _shape(value: Arg, fakes: Mapping[str, torch.Tensor]) -> Shape:
    return tuple(fakes[value.name].shape) if isinstance(value, Ref) else ()
