"""From the exported graph to a flat list of calls on named tensors, regions inlined."""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.graph import Arg, Kind, Ref, Tensor
from meshwright.ir.graph.images import is_channels_last
from meshwright.ir.torch_private import real_mode, region_of, schema_arguments, storage_key
from meshwright.ir.trace.capture import Capture
from meshwright.ir.trace.explain import needs_values
from meshwright.ir.trace.forbidden import check_tensor

MAX_CONSTANT = 65536
_NOISE = ("aten._assert_", "aten.sym_constrain")
_RESERVED = frozenset("aten comm device fx inf nan self sharded torch".split())
"""What generated code calls something else."""
_PLACES = ("device", "layout", "memory_format", "pin_memory")


@dataclass(slots=True)
class RawOp:
    """A call while it is being normalised; becomes an `Op`."""

    target: Any
    args: dict[str, Arg]
    outputs: list[str]
    path: str = ""
    source: str = ""
    grad: bool = True
    """False inside torch.no_grad()."""

    @property
    def name(self) -> str:
        return str(self.target)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(ref.name for value in self.args.values() for ref in refs(value))


@dataclass(slots=True)
class Raw:
    """The whole step while it is being normalised."""

    ops: list[RawOp] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Parameters, buffers, constants and inputs."""
    fakes: dict[str, torch.Tensor] = field(default_factory=dict)
    """An example of each value, for shape, strides and dtype."""
    inputs: list[str] = field(default_factory=list)
    loss: str = ""
    no_autocast: str = ""
    """Where the model turns torch.autocast off; empty: nowhere."""
    taken: dict[str, int] = field(default_factory=dict)

    def fresh(self, wanted: str) -> str:
        """A name that no other tensor has, near `wanted`."""
        stem = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "value"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        stem = f"{stem}_" if iskeyword(stem) or stem in _RESERVED else stem
        count = self.taken.get(stem)
        if count is None:
            self.taken[stem] = 0
            return stem
        self.taken[stem] = count + 1
        return self.fresh(f"{stem}_{count + 1}")


def refs(value: Arg) -> Iterable[Ref]:
    """The tensors in an argument, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


def substitute(value: Arg, names: dict[str, str]) -> Arg:
    """`value` with the tensors renamed that `names` knows."""
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(substitute(item, names) for item in value)
    return value


def make_op(target: object, given: dict[str, Arg], like: RawOp, outputs: list[str]) -> RawOp:
    """A call of `target` with its defaults filled in, at the place of `like`."""
    args = {a.name: given.get(a.name, a.default_value) for a in schema_arguments(target)}
    return replace(like, target=target, args=args, outputs=outputs)


def read(capture: Capture) -> Raw:
    """The exported step as a flat list of calls."""
    raw = Raw()
    program = capture.program
    env: dict[Node, Any] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    seen: dict[int, str] = {}
    names = iter(capture.names)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            env[node] = Ref(_placeholder(raw, capture, specs[node.name], node, seen, names))
    result = _read_nodes(raw, program.graph_module, env, grad=True)
    raw.loss = next(iter(refs(result))).name
    return raw


def _placeholder(
    raw: Raw, capture: Capture, spec: Any, node: Node, seen: dict[int, str], names: Any
) -> str:
    if spec.kind is InputKind.USER_INPUT:
        key = next(names)
        name = raw.fresh(f"input_{key}" if key.isdigit() else key)
        tensor = node.meta["val"]
        raw.tensors[name] = Tensor(
            name, tuple(tensor.shape), dtype_name(tensor.dtype), Kind.INPUT,
            channels_last=is_channels_last(tensor),
        )  # fmt: skip
        raw.inputs.append(name)
        raw.fakes[name] = tensor
        return name
    if spec.kind is InputKind.CUSTOM_OBJ:
        raise TraceError(f"the model reads {spec.target!r}, an object that is not a tensor")
    tensor = _state(capture, spec)
    if id(tensor) in seen:
        return seen[id(tensor)]
    name = seen[id(tensor)] = _state_tensor(raw, capture, spec, tensor)
    raw.fakes[name] = tensor
    return name


def _state(capture: Capture, spec: Any) -> torch.Tensor:
    """The (fake or constant) tensor behind a placeholder that is no user input."""
    if spec.kind is InputKind.PARAMETER:
        return capture.step.get_parameter(spec.target)
    if spec.kind is InputKind.BUFFER:
        return capture.step.get_buffer(spec.target)
    found = capture.program.constants[spec.target]
    assert isinstance(found, torch.Tensor)
    return found


def _state_tensor(raw: Raw, capture: Capture, spec: Any, tensor: torch.Tensor) -> str:
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    inside = spec.target.startswith("model.")
    fqn = spec.target.removeprefix("model.")
    if spec.kind is InputKind.PARAMETER and not inside:
        raise TraceError(f"the loss function has a parameter, {fqn}: move it into the model")
    if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and inside):
        kind = Kind.PARAMETER if spec.kind is InputKind.PARAMETER else Kind.BUFFER
        name = raw.fresh(fqn)
        raw.tensors[name] = Tensor(name, shape, dtype, kind, fqn, tensor.requires_grad)
        return name
    _check_own(capture, fqn, tensor)
    name = raw.fresh(f"constant_{fqn}")
    value = constant_value(fqn, capture.originals.get(id(tensor), tensor))
    raw.tensors[name] = Tensor(name, shape, dtype, Kind.CONSTANT, value=value)
    return name


def _check_own(capture: Capture, what: str, tensor: torch.Tensor) -> None:
    """A constant must not be an alias of a tensor that training changes."""
    memory = storage_key(tensor)
    model = capture.step.model
    state = (*model.named_parameters(), *model.named_buffers())
    for name, fake in state:
        if storage_key(capture.originals.get(id(fake), fake)) == memory:
            raise TraceError(
                f"constant {what} is an alias of {name}, made outside of the step, and would keep "
                f"its first values: read {name} itself where it is used, with .detach() there if "
                "no gradient shall flow"
            )


def constant_value(what: str, tensor: torch.Tensor) -> tuple[int | float | bool, ...]:
    """The flat elements of a tensor that the model made or holds as a plain attribute."""
    constant = getattr(tensor, "constant", None)
    tensor = tensor if constant is None else constant
    way_out = "register it with register_buffer, or compute it with torch operations on the inputs"
    if tensor.numel() > MAX_CONSTANT:
        raise TraceError(
            f"constant {what} has {tensor.numel()} elements, more than {MAX_CONSTANT}: {way_out}"
        )
    if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TraceError(f"constant {what} has no values while tracing: {way_out}")
    with real_mode():
        return tuple(tensor.detach().cpu().reshape(-1).tolist())


def _read_nodes(raw: Raw, module: GraphModule, env: dict[Node, Any], grad: bool) -> Any:
    """Append the calls of one (sub)graph; what its output node returns, as Refs."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            env[node] = module.get_submodule(node.target)
        elif node.op == "output":
            return _resolve(node.args[0], env)
        elif node.op == "call_function":
            if node.target is operator.getitem:
                env[node] = _item(env[node.args[0]], node.args[1])
            elif region_of(node):
                env[node] = _region(raw, node, env, grad)
            elif not str(node.target).startswith(_NOISE):
                env[node] = _call(raw, node, env, grad)
    raise AssertionError("a graph without an output")


def _region(raw: Raw, node: Node, env: dict[Node, Any], grad: bool) -> Any:
    """Inline a no-grad region, or one in which autocast is off, as it is all around: such a region
    changes nothing where nothing casts. The loss of precision of one with autocast cannot be
    kept."""
    if "autocast" not in region_of(node):
        enabled, body, *operands = _resolve(node.args, env)
        return _read_nodes(raw, body, _given(body, operands), grad and enabled)
    inside = next((n for n in node.args if isinstance(n, Node) and n.op == "get_attr"), None)
    places = map(source_of, env[inside].graph.nodes) if inside else iter(())
    where = source_of(node) or next(filter(None, places), "the model")
    _, _, enabled, _, body, *operands = _resolve(node.args, env)
    if enabled:
        raise TraceError(
            f"{where}: the model enters torch.autocast; leave it out, and ask for precision='bf16' "
            "instead"
        )
    raw.no_autocast = raw.no_autocast or where
    return _read_nodes(raw, body, _given(body, operands), grad)


def _given(body: GraphModule, operands: Sequence[Any]) -> dict[Node, Any]:
    """What a region reads, by its placeholders."""
    places = (n for n in body.graph.nodes if n.op == "placeholder")
    return dict(zip(places, operands, strict=True))


def _item(many: Any, index: Any) -> Any:
    return many if isinstance(many, _Unknown) else many[index]


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A result that depends on values: no harm as long as only assertions read it."""

    message: str


def _resolve(value: Any, env: dict[Node, Any]) -> Any:
    if isinstance(value, Node):
        found = env[value]
        if isinstance(found, _Unknown):
            raise TraceError(found.message)
        return found
    if isinstance(value, list | tuple):
        return tuple(_resolve(item, env) for item in value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return None
    return value


def _call(raw: Raw, node: Node, env: dict[Node, Any], grad: bool) -> Any:
    target: Any = node.target
    if not hasattr(target, "_schema"):
        return _Unknown(
            f"{source_of(node)}: {_told(target)} is not a tensor operation that can be planned; it "
            "comes from control flow, sizes that depend on data or a transform such as torch.vmap: "
            "compute sizes from shapes, write the batched operation itself"
        )
    positional = iter(node.args)
    args: dict[str, Arg] = {}
    for argument in schema_arguments(target):
        if argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        elif argument.kwarg_only:
            value = argument.default_value
        else:
            value = next(positional, argument.default_value)
        args[argument.name] = None if argument.name in _PLACES else _resolve(value, env)
    value = node.meta.get("val")
    if not _is_static(value):
        return _Unknown(needs_values(*line_of(node), str(target)))
    many = isinstance(value, list | tuple)
    values: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
    for made in values:
        if isinstance(made, torch.Tensor) and made.layout is not torch.strided:
            check_tensor(f"{source_of(node)}: the result of {_told(target)}", made)
    outputs = [_output(raw, node.name, v, i if many else None) for i, v in enumerate(values)]
    raw.ops.append(RawOp(target, args, outputs, module_path(node), source_of(node), grad))
    result = tuple(Ref(name) if name else None for name in outputs)
    return result if many else result[0]


def _told(target: Any) -> str:
    return str(getattr(target, "__name__", target)).strip("_")


def _is_static(value: object) -> bool:
    """Whether a result is made of tensors whose sizes are known."""
    if isinstance(value, torch.Tensor):
        return all(isinstance(size, int) for size in value.shape)
    if isinstance(value, list | tuple):
        return all(map(_is_static, value))
    return value is None


def _output(raw: Raw, stem: str, value: object, index: int | None) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    name = raw.fresh(stem if index is None else f"{stem}_{index}")
    raw.fakes[name] = value
    return name


def module_path(node: Node) -> str:
    """Path of the module that ran the node, in the user's model."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"@\d+", "", path)
    return "" if path == "model" else path.removeprefix("model.")


_FRAME = re.compile(r'File "([^"]+)", line (\d+).*\n?(.*)')


def line_of(node: Node) -> tuple[str, str]:
    """`file:line` and text of the innermost frame of the user's code (not of torch)."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, number, text in reversed(frames):
        if "/torch/" not in file and not file.endswith("ir/trace/loss_module.py"):
            return f"{file}:{number}", text.strip()
    return "", ""


def source_of(node: Node) -> str:
    """`file:line` of the user's code, with one folder."""
    return "/".join(line_of(node)[0].split("/")[-2:])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
