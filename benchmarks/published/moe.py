"""The expert block of a layer."""

from math import ceil

from benchmarks.published.ops import Message, Piece, batched, grouped, linear, pointwise
from benchmarks.published.site import Site, add, norm
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive


def experts(site: Site) -> tuple[Piece, ...]:
    """Top-k experts with capacity factor 1 per choice; dispatch and return by all-to-all."""
    shape, h = site.shape, site.shape.hidden
    routed = site.tokens * shape.top_k
    width = shape.expert_ffn // site.tp
    moved = Message(Primitive.ALL_TO_ALL, 2 * routed * h * site.ep, "ep", "forward")
    back = Message(Primitive.ALL_TO_ALL, 2 * routed * h * site.ep, "ep", "backward")
    into = 2 * width if shape.gated else width
    local = max(1, shape.experts // site.ep)
    up = grouped("experts up", local, ceil(routed / local), h, into, site.dtype)
    down = grouped("experts down", local, ceil(routed / local), width, h, site.dtype)
    router = linear("router", site.tokens, h, shape.experts, site.dtype, saved=False)
    spread = (pointwise("dispatch", routed * h, 4, 4, op_class=OpClass.GATHER),)
    merge = (pointwise("combine", routed * h, 3, 4, saved_bytes=2 * routed * h),)
    act = pointwise("activation", routed * width, 4, 6, saved_bytes=2 * routed * width,
                    op_class=OpClass.TRANSCENDENTAL)  # fmt: skip
    if site.system.one_hot_experts:
        turned = pointwise("groups and experts", routed * h, 4, 4, op_class=OpClass.COPY)
        spread = (_places(site), _one_hot(site, "dispatch"), turned)
        merge = (turned, _one_hot(site, "combine"))
    if site.ep > 1:
        up, down = up.sending(moved, back), down.sending(moved, back)
    return (norm(site, "norm 2"), router, *spread, up, act, down, *merge,
            add(site, "add 2"))  # fmt: skip


def _places(site: Site) -> Piece:
    """Makes the one-hot tensor: its weights, whether each is set, and that as numbers; its gradient
    is read back."""
    count = site.tokens * site.shape.top_k * site.system.one_hot_experts
    return pointwise("places", count, 2 + 2 + 1 + 1 + 2, 2)


def _one_hot(site: Site, name: str) -> Piece:
    """Tokens to and from experts by a product with a one-hot tensor of (token, expert, place).

    Each group of tokens has `top_k` places per token, over all experts.
    """
    group = site.system.one_hot_experts
    places = site.shape.top_k * group
    groups = max(1, site.tokens // group)
    kept = 2 * site.tokens * places
    return batched(name, groups, places, group, site.shape.hidden, site.half, kept)
