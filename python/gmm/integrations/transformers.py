"""Hugging Face transformers: an experts implementation named "gmm".

    gmm.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="gmm")

or model.set_experts_implementation("gmm"), after register(). Every model whose experts transformers runs through its
ExpertsInterface takes it, to train and to generate, on any device that gmm runs on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gmm.grouped_mm import grouped_mm
from gmm.integrations._packages import require
from gmm.moe import feed_forward, gated_activation, permute, permute_weights, unpermute
from gmm.ragged.autograd import autocast_is_on

# gmm's names of transformers' activation modules, with and without a gate, where they are the same function.
_ACTIVATIONS = {
    "SiLUActivation": ("swiglu", "silu"),
    "SiLU": ("swiglu", "silu"),
    "GELUActivation": ("geglu", "gelu"),
    "GELUTanh": ("geglu_tanh", "gelu_tanh"),
    "ReLU": ("reglu", "relu"),
    "ReLUSquaredActivation": (None, "relu2"),
}


class _Activation(NamedTuple):
    """Of gmm.moe.gated_activation."""

    kind: str
    interleaved: bool = False
    limit: float | None = None


def register() -> None:
    """Makes experts_implementation="gmm" known to transformers. May be called again.

    Raises:
        ImportError: no transformers, or one without ExpertsInterface.
    """
    require("transformers.integrations.moe", "transformers").ExpertsInterface.register("gmm", experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What an experts module's forward computes.

    Args:
        self: the module, with the fields that transformers' use_experts_implementation gives it.
        hidden_states: [T, H].
        top_k_index: [T, k] expert ids; num_experts stands for one that another process holds.
        top_k_weights: [T, k], bfloat16, float16 or float32.

    Returns:
        [T, H], in the dtype of hidden_states; the k contributions of a token are added in float32, in a fixed order.

    Does not synchronise; its ends of groups stay on the device.
    """
    x = hidden_states if autocast_is_on(hidden_states.device) else hidden_states.to(self.down_proj.dtype)
    x, row_map, offs = permute(x, top_k_index, self.num_experts)
    first, known = "gate_up_proj" if self.has_gate else "up_proj", _activation(self)
    # Weights may scale what enters a product, which spares backward to read its result, unless more is done to that.
    normed = getattr(self, "has_post_expert_norm", False)  # younger than the others
    early = not (self.has_bias or normed)
    weights = permute_weights(top_k_weights, row_map) if early else None
    if early and known is not None:
        parameters = getattr(self, first), self.down_proj
        y = feed_forward(x, *parameters, offs, weights, **known._asdict(), trans_b=not self.is_transposed)
    else:
        h = _activate(self, _product(self, first, x, offs), known, weights)
        y = _product(self, "down_proj", h, offs)
    if normed:
        y = self.post_expert_norm(y)
    return unpermute(y, row_map, None if early else top_k_weights).to(hidden_states.dtype)


def _product(self: Any, name: str, x: Tensor, offs: Tensor) -> Tensor:
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    return grouped_mm(x, getattr(self, name), offs, bias, trans_b=not self.is_transposed)


def _activate(self: Any, h: Tensor, known: _Activation | None, weights: Tensor | None) -> Tensor:
    """The module's activation, in one kernel where gmm has it, times the rows' weights."""
    if known is not None:
        return gated_activation(h, **known._asdict(), weights=weights)
    h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
    return h if weights is None else (h * weights.unsqueeze(-1)).to(h.dtype)


def _activation(self: Any) -> _Activation | None:
    """gmm's form of what the module computes; None where it has none."""
    if not self.has_gate:
        kind = _ACTIVATIONS.get(type(self.act_fn).__name__, (None, None))[1]
        return None if kind is None else _Activation(kind)
    gate = type(self)._apply_gate
    if gate.__module__ == "transformers.models.gpt_oss.modeling_gpt_oss" and self.alpha == 1.702:
        return _Activation("swiglu_oai", interleaved=True, limit=self.limit)
    if gate.__module__ != "transformers.integrations.moe":  # where the default is; a model's own may be anything
        return None
    kind = _ACTIVATIONS.get(type(self.act_fn).__name__, (None, None))[0]
    return None if kind is None else _Activation(kind)
