"""Ops to measure: those of a model at one rank's shapes; without a model, a grid of common ones."""

from collections.abc import Iterator, Mapping
from math import prod

from meshwright.codegen.lower.local import form_of
from meshwright.costmodel.block.price_ops import PricedOp
from meshwright.costmodel.ops.keys import op_key
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.device import COMPUTE, OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Block, Ref
from meshwright.ir.graph.op_site import Form, In, OpSite
from meshwright.ir.plan.plan import BlockLayout
from meshwright.ir.precision import precision as known_precision
from meshwright.planner.problem.problem import Problem
from meshwright.profiling.work import Local, distinct_blocks, locals_of
from meshwright.runtime.profiling.tasks import OpTask, TaskInput
from meshwright.runtime.profiling.values import rows_below


def op_tasks(problem: Problem) -> list[OpTask]:
    """Every distinct op of the model's blocks that is more than a view; heavy ones come first."""
    found: dict[str, OpTask] = {}
    for local in locals_of(problem):
        layouts = {x.pattern: x for x in problem.layouts(local.model)}
        for block, _ in distinct_blocks(problem.graph):
            for task in _of_block(problem, block, layouts[block.pattern], local):
                found.setdefault(task.key, task)
    return sorted(found.values(), key=lambda task: -task.flops - task.moved_bytes)


def _of_block(
    problem: Problem, block: Block, layout: BlockLayout, local: Local
) -> Iterator[OpTask]:
    device = problem.tables.device_names[0]
    spot = local.spot(device)
    costs = problem.tables.blocks
    site = costs.site(spot)
    for entry in costs.walk(block, layout, spot).trail:
        if isinstance(entry, PricedOp) and entry.local.op_class is not OpClass.VIEW:
            at = OpSite(entry.op, problem.graph.tensors, entry.strategies, site.axes,
                      site.coordinates)  # fmt: skip
            yield _task(problem, entry, form_of(at), {"dp": local.dp, **dict(local.model)})


def _task(problem: Problem, step: PricedOp, form: Form, sizes: Mapping[str, int]) -> OpTask:
    op, local = step.op, step.local
    facts = problem.tables.facts
    computes = local.op_class in COMPUTE
    operands = []
    for name, operand in zip(op.inputs, local.inputs, strict=True):
        own = facts.dtypes[name]
        floats = own.startswith(("float", "bfloat"))
        operands.append(
            TaskInput(
                shape=operand.shape,
                dtype=local.dtype if floats and (computes or operand.cast_bytes) else own,
                requires_grad=operand.requires_grad and local.differentiable,
                is_param=operand.is_param,
                below=0 if floats else rows_below(problem.graph, name),
                step=_step(step, name),
                channels_last=operand.channels_last,
            )
        )
    return OpTask(
        key=op_key(local),
        target=op.target,
        call=form.target,
        op_class=local.op_class,
        args=form.args,
        operands=tuple(operands),
        dtype=local.dtype,
        flops=local.flops,
        moved_bytes=float(sum(i.nbytes for i in local.inputs) + local.output_bytes),
        causal=local.causal,
        channels_last=local.channels_last,
        sizes=sizes,
    )


def _step(step: PricedOp, name: str) -> int:
    """Where bags begin: they are equally long."""
    args = dict(step.op.args)
    if args.get("offsets") != Ref(name):
        return 0
    shapes = dict(zip(step.op.inputs, (i.shape for i in step.local.inputs), strict=True))
    indices = args["indices"]
    assert isinstance(indices, Ref)
    return max(1, prod(shapes[indices.name]) // max(1, shapes[name][0]))


_CPU_FLOPS = 2e10
"""A core takes about a second for as much."""
_ROWS = (16, 256, 4096)
_WIDTHS = (256, 1024, 4096)
_ELEMENTS = tuple(4**i for i in range(6, 13))


def grid(precision: str, kind: str, most_bytes: int) -> list[OpTask]:
    """Ops of each class over sizes, in the precision's dtype; for what no model has asked of."""
    dtype = known_precision(precision).products
    most_flops = _CPU_FLOPS if kind == "cpu" else float("inf")
    return [
        task for task in _grid(dtype)
        if 4 * task.moved_bytes < most_bytes and task.flops < most_flops
    ]  # fmt: skip


def _grid(dtype: str) -> Iterator[OpTask]:
    for rows in _ROWS:
        for width in _WIDTHS:
            yield _made(
                "aten.linear.default", dtype, {"input": (rows, width), "weight": (width, width)},
                (rows, width), 2 * rows * width * width, params=("weight",),
            )  # fmt: skip
            yield _made(
                "aten.layer_norm.default", dtype,
                {"input": (rows, width), "weight": (width,), "bias": (width,)},
                (rows, width), 0, params=("weight", "bias"), normalized_shape=(width,), eps=1e-5,
            )  # fmt: skip
            yield _made("aten.softmax.int", dtype, {"self": (rows, width)}, (rows, width), 0, dim=1)
    for heads, tokens in ((4, 128), (16, 512), (16, 2048)):
        shape = (1, heads, tokens, 64)
        named = {"query": shape, "key": shape, "value": shape}
        yield _made("aten.scaled_dot_product_attention.default", dtype, named, shape,
                    4 * heads * tokens * tokens * 64, attn_mask=None, dropout_p=0.0,
                    is_causal=True)  # fmt: skip
    for channels, side in ((32, 28), (64, 56), (256, 14)):
        image = (4, channels, side, side)
        yield _made(
            "aten.conv2d.default", dtype,
            {"input": image, "weight": (channels, channels, 3, 3)}, image,
            2 * prod(image) * channels * 9, params=("weight",),
            bias=None, stride=(1, 1), padding=(1, 1),
        )  # fmt: skip
    for numel in _ELEMENTS:
        flat = (numel // 64, 64)
        yield _made("aten.add.Tensor", dtype, {"self": flat, "other": flat}, flat, 0)
        yield _made("aten.gelu.default", dtype, {"self": flat}, flat, 0)
        yield _made("aten.clone.default", dtype, {"self": flat}, flat, 0)
        yield _made("aten.sum.dim_IntList", dtype, {"self": flat}, flat[:1], 0, dim=(1,))
        yield _made("aten.embedding.default", dtype, {"weight": flat, "indices": flat[:1]},
                    flat, 0, params=("weight",))  # fmt: skip


def _made(
    target: str,
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    output: tuple[int, ...],
    flops: int,
    params: tuple[str, ...] = (),
    **more: object,
) -> OpTask:
    """A task whose operands all have gradients, but for whole numbers."""
    operands = [
        TaskInput(
            shape=shape,
            dtype="int64" if name == "indices" else dtype,
            requires_grad=name != "indices",
            is_param=name in params,
            below=shapes["weight"][0] if name == "indices" else 0,
        )
        for name, shape in shapes.items()
    ]
    inputs = tuple(
        LocalInput(o.shape, prod(o.shape) * DTYPE_BYTES[o.dtype], o.requires_grad, o.is_param)
        for o in operands
    )
    causal = bool(more.get("is_causal"))
    local = LocalOp(
        target=target, op_class=classify(target), dtype=dtype, flops=flops, inputs=inputs,
        outputs=(output,), output_bytes=prod(output) * DTYPE_BYTES[dtype], differentiable=True,
        causal=causal,
    )  # fmt: skip
    named = tuple((name, In(i)) for i, name in enumerate(shapes))
    return OpTask(
        key=op_key(local), target=target, call=target, op_class=local.op_class,
        args=(*named, *more.items()), operands=tuple(operands), dtype=dtype, flops=float(flops),
        moved_bytes=float(sum(i.nbytes for i in inputs) + local.output_bytes), causal=causal,
    )  # fmt: skip
