"""The embedding, and the head with its loss."""

from benchmarks.published.ops import Message, Piece, linear, lookup, pointwise
from benchmarks.published.site import Site, add, entering, input_kept_once, norm
from meshwright.ir.layout.conversions import Primitive


def embedding(site: Site) -> tuple[Piece, ...]:
    """Token (and position) embedding."""
    h = site.shape.hidden
    found = lookup("embedding", site.tokens, h, site.shape.vocab // site.tp)
    if site.tp > 1:
        kind = Primitive.REDUCE_SCATTER if site.sp else Primitive.ALL_REDUCE
        found = found.sending(Message(kind, 2 * site.tokens * h, "tp", "forward"))
    if not site.shape.positions:
        return (found,)
    return (found, add(site, "positions"))


def head(site: Site, vocab: int) -> tuple[Piece, ...]:
    """Last norm, logits and loss: cast, subtract, exponential, normalise, and their gradient."""
    h, width = site.shape.hidden, vocab // site.tp
    project = linear("head", site.tokens, h, width, site.half)
    entries = site.tokens * width
    saved = site.system.saved_logits_bytes * entries
    # Compilers pass over the logits twice each way.
    moved = (12, 8) if site.system.pointwise == "compiled" else site.system.loss_bytes
    loss = pointwise("loss", entries, *moved, saved_bytes=saved)
    return (norm(site, "last norm"), entering(site, input_kept_once(site, project)), loss)
