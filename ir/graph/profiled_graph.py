"""A Graph from a layer profile, without a torch model: one block and one op per layer.

Each op carries its measured seconds; `costmodel.block.layer_profile` reads them from there. A layer
takes time and gives bytes in proportion to its samples, and only its batch can be split.
"""

from collections.abc import Mapping
from math import ceil, isfinite
from typing import Any

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Block, Graph, Kind, Op, Ref, Tensor
from meshwright.ir.profile.layer_profile import LayerProfile, MeasuredLayer
from meshwright.ir.text.digest import digest

LAYER = "profile.layer"
_BATCH, _LOSS = "batch", "loss"
_DTYPE, _ELEMENT_BYTES = "float32", 4


def profiled_graph(
    profile: LayerProfile,
    batch_size: int,
    *,
    kept_bytes: Mapping[str, int] | None = None,
    speeds: Mapping[str, float] | None = None,
) -> Graph:
    """The training step that the profile describes, at a global batch size.

    A profile does not say what autograd keeps inside a layer, only what leaves it. `kept_bytes`:
    layer name -> bytes per sample that it keeps for its backward besides what it reads. `speeds`:
    device type -> how many times as fast as measured its layers are; without it the profile is of
    the one device type of a cluster.
    """
    kept = kept_bytes or {}
    if batch_size < 1:
        raise PlanError(f"a global batch of {batch_size} samples; it must be 1 or more")
    if unknown := kept.keys() - {layer.name for layer in profile.layers}:
        raise PlanError(f"profile {profile.name} has no layers {sorted(unknown)}")
    for device, speed in (speeds or {}).items():
        if not (speed > 0 and isfinite(speed)):
            raise PlanError(
                f"profile {profile.name}: the speed of {device} is {speed}; it must be positive, "
                "such as 2.3 for times that are 2.3 times as short as those measured"
            )
    made = _GraphMaker(profile, batch_size, kept, tuple(sorted((speeds or {}).items())))
    ops = tuple(made.op(position) for position in range(len(profile.layers)))
    return Graph(
        tensors=made.tensors,
        ops=ops,
        prelude=0,
        blocks=_blocks(profile, ops, made.tensors),
        inputs=tuple(made.inputs),
        input_names=tuple(made.inputs),
        loss=_LOSS,
        batch_size=batch_size,
        batch_inputs=tuple(made.inputs),
        fingerprint=digest([_plain(op, made.tensors) for op in ops]),
        meta={"model": profile.name},
    )


class _GraphMaker:
    """Makes ops in order, and the tensors they need."""

    def __init__(
        self,
        profile: LayerProfile,
        batch: int,
        kept: Mapping[str, int],
        speeds: tuple[tuple[str, float], ...],
    ) -> None:
        self.profile, self.batch, self.kept, self.speeds = profile, batch, kept, speeds
        self.tensors = {_BATCH: Tensor(_BATCH, (batch, 1), "int64", Kind.INPUT)}
        self.inputs = [_BATCH]
        """Of the graph: the batch, and what is made of it alone."""
        self.reads: dict[int, list[str]] = {}
        """Position -> names of the tensors that the layer there reads."""

    def op(self, position: int) -> Op:
        layer = self.profile.layers[position]
        read = self.reads.get(position) or [_BATCH]
        state = self._parameter(layer)
        outputs = self._outputs(position, layer)
        values: dict[str, Any] = {
            "forward_s": layer.forward_s / self.profile.micro_batch,
            "backward_s": layer.backward_s / self.profile.micro_batch,
        }
        if self.speeds:
            values["speeds"] = self.speeds
        inputs = (*read, *state)
        return Op(
            name=_name(layer),
            key="/layer",
            target=f"{LAYER}.{digest(values)}",
            args=(("inputs", tuple(map(Ref, inputs))), *values.items()),
            inputs=inputs,
            outputs=outputs,
            module_path=_name(layer),
            saved=tuple(name for name in read if self.tensors[name].kind is Kind.ACTIVATION),
            saved_extra_bytes=self.kept.get(layer.name, 0) * self.batch,
        )

    def _parameter(self, layer: MeasuredLayer) -> tuple[str, ...]:
        if not layer.parameter_bytes:
            return ()
        fqn = f"{_name(layer)}.weight"
        shape = (ceil(layer.parameter_bytes / _ELEMENT_BYTES),)
        self.tensors[fqn] = Tensor(fqn, shape, _DTYPE, Kind.PARAMETER, fqn, requires_grad=True)
        return (fqn,)

    def _outputs(self, position: int, layer: MeasuredLayer) -> tuple[str, ...]:
        """What the op gives. What no parameter reaches is an input of the graph instead: each
        stage takes it from the batch, and the op is there for its time."""
        reached = self.profile.reached[position]
        kind = Kind.ACTIVATION if reached else Kind.INPUT
        names = []
        for index, tensor in enumerate(self.profile.emitted[position]):
            name = f"{_name(layer)}:{index}"
            elements = ceil(tensor.nbytes / self.profile.micro_batch / _ELEMENT_BYTES)
            shape = (self.batch, max(1, elements))
            self.tensors[name] = Tensor(name, shape, _DTYPE, kind, requires_grad=reached)
            names.append(name)
            for reader in tensor.readers:
                self.reads.setdefault(reader, []).append(name)
        if not reached:
            self.inputs += names
            names = []
        if position == len(self.profile.layers) - 1:
            self.tensors[_LOSS] = Tensor(_LOSS, (), _DTYPE, Kind.ACTIVATION, requires_grad=reached)
            names.append(_LOSS)
        return tuple(names)


def _name(layer: MeasuredLayer) -> str:
    """`node5.layer_0`: the first word of the description, for people."""
    word = "".join(c if c.isalnum() or c in "_-" else " " for c in layer.description).split()
    return ".".join((layer.name, *word[:1]))


def _plain(op: Op, tensors: Mapping[str, Tensor]) -> list[object]:
    """What makes an op what it is, without names of its own."""
    return [
        op.target,
        [tensors[n].shape for n in (*op.inputs, *op.outputs)],
        [tensors[n].kind.value for n in op.inputs],
        [tensors[n].requires_grad for n in (*op.inputs, *op.outputs)],
        op.saved_extra_bytes,
    ]


def _blocks(
    profile: LayerProfile, ops: tuple[Op, ...], tensors: Mapping[str, Tensor]
) -> tuple[Block, ...]:
    later = {name for op in ops for name in op.inputs}
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    drafts = []
    for index, op in enumerate(ops):
        outputs = tuple(n for n in op.outputs if n in later)
        signature = digest([_plain(op, tensors), len(outputs)])
        first.setdefault(signature, op.name)
        count[signature] = count.get(signature, 0) + 1
        drafts.append((index, op, signature, outputs))
    return tuple(
        Block(
            name=op.name,
            pattern=first[signature] + "*" * (count[signature] > 1),
            signature=signature,
            start=index,
            stop=index + 1,
            inputs=tuple(n for n in op.inputs if tensors[n].kind is not Kind.PARAMETER),
            outputs=outputs,
            params=tuple(n for n in op.inputs if tensors[n].kind is Kind.PARAMETER),
        )
        for index, op, signature, outputs in drafts
    )
