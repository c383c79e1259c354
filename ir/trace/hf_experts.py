"""Experts of transformers' models as one operator: those of its common interface by what they say
of themselves, others by a forward of their own for the time of a trace."""

import warnings
from collections.abc import Callable
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.integrations import moe

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.expert_form import ExpertForm
from meshwright.ir.trace.declared import declared_forward, mix_experts
from meshwright.ir.trace.found_gate import found_gate, numbers_of

_LIBRARY = "transformers."
_GATE = "_meshwright_gate"
"""Attribute of a (copied) module: the text of its gate."""


def set_up(copy: nn.Module) -> None:
    """Find the gates of a (copied) model's experts, and replace what only loops can express."""
    for module in copy.modules():
        if declared_forward(module):
            continue
        of_library = type(module).__module__.startswith(_LIBRARY)
        if type(module).__name__ in _FORWARDS and of_library:
            path, forward = _FORWARDS[type(module).__name__]
            vars(module)[_GATE] = _act_of(module, attrgetter(path)(module))
            module.forward = MethodType(forward, module)
        elif hasattr(module, "_apply_gate") and hasattr(module, "down_proj"):
            decorated = hasattr(module, "has_gate")
            if decorated or of_library:
                vars(module)[_GATE] = _gate_of(module)
            if of_library and not decorated:  # the same otherwise
                module.forward = MethodType(_undecorated, module)


def common_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """An expert layer of the common interface as one operator; where it is of none of our forms, as
    batched products, which gather a weight for each token."""
    act = vars(self).get(_GATE, "")
    if not act or self.has_post_expert_norm:
        warnings.warn(
            f"{type(self).__name__}: what its experts compute is of no form that is one operator "
            "here (docs/experts.md): it is traced as products that gather a weight for each token",
            stacklevel=2,
        )
        return moe.batched_mm_experts_forward(self, hidden, top_k_index, top_k_weights)
    first = "gate_up_proj" if self.has_gate else "up_proj"
    form = ExpertForm(
        transposed_first=self.is_transposed, transposed_last=self.is_transposed,
        interleaved=self.has_gate and not self.is_concatenated,
    )  # fmt: skip
    return mix_experts(
        hidden, top_k_index, top_k_weights, getattr(self, first), self.down_proj, act=act,
        gate_up_bias=getattr(self, f"{first}_bias") if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None, form=form,
    )  # fmt: skip


def _gate_of(module: Any) -> str:
    gated = getattr(module, "has_gate", True)
    return found_gate(
        module._apply_gate if gated else module.act_fn, numbers_of(module), gated=gated,
        interleaved=not getattr(module, "is_concatenated", True),
    )  # fmt: skip


def _act_of(module: nn.Module, act: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The gate of a plain activation; TraceError if it is none of ours."""
    if text := found_gate(act, numbers_of(module), gated=False):
        return text
    raise TraceError(
        f"{type(module).__name__}: its activation {act} is no file of ir/gates; put one that "
        "computes it into a folder that MESHWRIGHT_GATES names"
    )


def _undecorated(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    act = vars(self)[_GATE]
    if not act:
        raise TraceError(
            f"{type(self).__name__}: what it computes between its experts' products is no file of "
            "ir/gates; put one that does into a folder that MESHWRIGHT_GATES names"
        )
    return mix_experts(hidden, index, weights, self.gate_up_proj, self.down_proj, act=act)


def _llama4(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts on all tokens, whose inputs are multiplied by a score that is 0 for most."""
    hidden = hidden.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden)
    index = torch.topk(logits, self.top_k, dim=1).indices
    experts = self.experts
    made = mix_experts(
        hidden, index, scores.gather(1, index), experts.gate_up_proj, experts.down_proj,
        act=vars(self)[_GATE],
        form=ExpertForm(transposed_first=True, transposed_last=True, scaled_input=True),
    )  # fmt: skip
    return self.shared_expert(hidden) + made, logits


def _dbrx(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Three stacks of matrices, one under the other."""
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    mlp = self.mlp
    made = mix_experts(
        hidden.reshape(-1, self.hidden_size), index, weights, mlp.w1.view(shape),
        mlp.w2.view(shape),
        act=vars(self)[_GATE], up=mlp.v1.view(shape),
        form=ExpertForm(transposed_last=True),
    )  # fmt: skip
    return made.view(hidden.shape[0], -1, self.hidden_size)


def _longcat(
    self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The last experts hand tokens on as they are."""
    count = self.num_routed_experts
    kept = (weights * (index >= count)).sum(-1, keepdim=True).to(hidden.dtype)
    made = mix_experts(
        hidden, index, weights, self.gate_up_proj[:count], self.down_proj,
        act=vars(self)[_GATE], form=ExpertForm(weightless=self.total_experts - count),
    )  # fmt: skip
    handed_on: torch.Tensor = hidden * kept
    return made + handed_on


def _switch(
    self: Any, hidden: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Experts are modules; `selected` [T, 1, E] has a 1 for the one picked, none if dropped."""
    experts = [self[f"expert_{i}"] for i in range(self.num_experts)]
    _without_dropout(experts[0])
    one_hot = selected[:, 0]
    index = torch.where(one_hot.amax(-1) > 0, one_hot.argmax(-1), -1)
    return mix_experts(
        hidden, index.unsqueeze(-1), weights, torch.stack([e.wi.weight for e in experts]),
        torch.stack([e.wo.weight for e in experts]), act=vars(self)[_GATE],
    )  # fmt: skip


def _nllb(self: Any, hidden: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> Any:
    """Experts are modules; the library takes the mask [T, E] for their numbers, and so do we."""
    experts = [self[f"expert_{i}"] for i in range(self.num_experts)]
    _without_dropout(experts[0])
    _without_dropout(self)
    return mix_experts(
        hidden, mask, weights, torch.stack([e.fc1.weight for e in experts]),
        torch.stack([e.fc2.weight for e in experts]), act=vars(self)[_GATE],
        gate_up_bias=torch.stack([e.fc1.bias for e in experts]),
        down_bias=torch.stack([e.fc2.bias for e in experts]),
    )  # fmt: skip


def _without_dropout(module: nn.Module) -> None:
    """TraceError if there is dropout between an expert's products, or behind them."""
    for child in module.children():
        if isinstance(child, nn.Dropout) and child.p:
            raise TraceError(
                f"{type(module).__name__} has dropout of {child.p} inside of its experts, which "
                "are one operator here: set it to 0"
            )


_FORWARDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "Llama4TextMoe": ("experts.act_fn", _llama4),
    "DbrxExperts": ("mlp.activation_fn", _dbrx),
    "LongcatFlashExperts": ("act_fn", _longcat),
    "SwitchTransformersExperts": ("expert_0.act", _switch),
    "NllbMoeExperts": ("expert_0.act", _nllb),
}
"""By class: where its activation is, and its forward while it is traced."""
