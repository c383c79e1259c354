"""What the forms of several families of operators are made of."""

from dataclasses import replace
from keyword import iskeyword

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.op_facts import MakeForm
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import dim_of
from meshwright.ir.layout.layout import Shard
from meshwright.ir.layout.nesting import dim_runs, splits_of
from meshwright.ir.layout.numbering import numbering


def then(*makes: MakeForm) -> MakeForm:
    """Change a form by each in turn."""

    def make(site: OpSite, form: Form) -> Form:
        for each in makes:
            form = each(site, form)
        return form

    return make


def sharded(form: Form, target: str, /, **extra: Value) -> Form:
    """Call a function of `codegen.sharded.sharded`; a name that Python keeps for itself, such as
    `from`, gets an underscore."""
    named = tuple((f"{n}_" if iskeyword(n) else n, v) for n, v in form.having(**extra).args)
    return replace(form, args=named, target=f"sharded.{target}")


def always(target: str) -> MakeForm:
    """Call a function of `codegen.sharded.sharded`, however the op is split."""
    return lambda site, form: sharded(form, target)


def without(form: Form, *names: str) -> Form:
    return replace(form, args=tuple((n, v) for n, v in form.args if n not in names))


def with_size(argument: str) -> MakeForm:
    """Give the argument that is the shape of the output the rank's."""

    def make(site: OpSite, form: Form) -> Form:
        form = replace(form, whole=False)
        has = argument in dict(form.args)
        return form.having(**{argument: site.local_output()}) if has else form

    return make


def sized_as(target: str, argument: str) -> MakeForm:
    """The other tensor only lends its shape, and may be placed otherwise."""

    def make(site: OpSite, form: Form) -> Form:
        args: tuple[tuple[str, Value], ...] = (("self", In(0)), (argument, site.local_output()))
        return replace(form, target=target, args=args)

    return make


def split_dim(site: OpSite) -> int | None:
    """The dim that the op works along, if it is split."""
    dim = dim_of(site.op, len(site.input(0).shape))
    return dim if site.is_split(0, dim) else None


def index_of(form: Form, name: str) -> int:
    """Which input of the op an argument is."""
    value = form.arg(name)
    assert isinstance(value, In), name
    return value.index


def own_part(site: OpSite, index: int, dim: int) -> dict[str, Value]:
    """Which axes split this dim of an input, and which elements of it the rank has; or nothing."""
    splits = splits_of(site.input_layout(index), site.axes).get(dim, {})
    if not splits:
        return {}
    runs = dim_runs(site.input(index).shape[dim], splits, site.coordinates)
    if len(runs) > 1:
        texts = ", ".join(f"{shard} on {axis}" for axis, (shard, _) in splits.items())
        raise PlanError(f"{site.op.key}: {texts} gives a rank of input {index} several sections")
    start, size = runs[0] if runs else (0, 0)
    return {"axes": tuple(splits), "start": start, "size": size}


def own_classes(target: str, index: int = 0, dim: int = 1) -> MakeForm:
    """Call a loss of `codegen.sharded.sharded` where the classes are split, which are a dim of its
    logits or of another input."""

    def make(site: OpSite, form: Form) -> Form:
        own = own_part(site, index, dim)
        return sharded(form, target, **own, classes=site.input(index).shape[dim]) if own else form

    return make


def run_sizes(site: OpSite, axis: str, size: int, shard: Shard) -> tuple[int, ...]:
    """Elements of each rank, which are one run of a dim of global `size`."""
    if shard.outer > 1:
        raise PlanError(f"{site.op.key}: {shard} on {axis} has sections; outer must be 1")
    return tuple(shard.inner * n for n in site.axes[axis].sizes(size // shard.inner))


def splitting(site: OpSite, index: int, dim: int) -> list[str]:
    """Axes that split a dim of an input."""
    shards = site.input_shards(index)
    return [axis for axis, p in shards if p.dim == dim and site.axes[axis].size > 1]


def only_axis(site: OpSite, dim: int, axes: list[str]) -> str:
    """The one that splits a dim; PlanError if there are several."""
    if len(axes) > 1:
        raise PlanError(
            f"{site.op.key}: dim {dim} is split over {', '.join(axes)}; "
            "what communicates inside an op is split over one axis"
        )
    return axes[0]


def numbered(site: OpSite, shape: tuple[int, ...]) -> dict[str, Value]:
    """What says the numbers of the elements that this rank has of a value of global `shape`, which
    is placed as what the op makes is; without what is so for samples that lie whole in order."""
    found = numbering(shape, site.output_layout(0), site.axes, site.coordinates)
    extra: dict[str, Value] = {"per_sample": found.per_sample} if found.per_sample else {}
    if found.first:
        extra["first"] = found.first
    if (found.sizes, found.strides) != ((-1,), (1,)):
        extra |= {"sizes": found.sizes, "strides": found.strides}
    return extra
