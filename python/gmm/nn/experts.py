"""gmm.nn.GroupedExperts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from gmm.check import check_no_tangents
from gmm.moe import KINDS, gated_activation
from gmm.moe.activation import check_options
from gmm.moe.feed_forward import check_operands, swiglu_feed_forward
from gmm.nn.linear import GroupedLinear
from gmm.ragged.autograd import within_torch_func

_GATE_UP = ("concatenated", "interleaved", "apart")


class GroupedExperts(nn.Module):
    """The feed-forward networks of an MoE layer, on tokens that are sorted by expert: down(activation(gate, up)).

    Args:
        num_experts: E.
        hidden_size: H, of the tokens.
        ffn_size: I, between the two products.
        activation: one of gmm.moe.KINDS, for instance "swiglu", "geglu", "relu2"; those without a gate have no gate
            projection.
        gate_up: how gate and up are stored: "concatenated" (gate_up.weight [E, 2*I, H], gate first), "interleaved" (in
            it, rows of gate and up in turn) or "apart" (gate.weight and up.weight [E, I, H]). Without a gate it
            is up.weight.
        bias: whether the products have one.
        limit: gate and up are clamped to it first; see gmm.moe.gated_activation.
        linear_options: parameter_per_group, fuse_wgrad_accumulation, delay_wgrad_compute, sm_margin, device and dtype,
            as of gmm.nn.GroupedLinear, which all the projections are.

    Raises:
        ValueError: a size below 0; an unknown activation or gate_up; a limit that gated_activation() does not take.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        activation: str = "swiglu",
        *,
        gate_up: str = "concatenated",
        bias: bool = False,
        limit: float | None = None,
        **linear_options: Any,
    ) -> None:
        super().__init__()
        if activation not in KINDS:
            raise ValueError(f"activation: expected one of {', '.join(KINDS)}, got {activation!r}")
        if gate_up not in _GATE_UP:
            raise ValueError(f"gate_up: expected one of {', '.join(_GATE_UP)}, got {gate_up!r}")
        self.num_experts, self.activation, self.limit = num_experts, activation, limit
        gated = KINDS[activation].gated
        self.interleaved = gate_up == "interleaved" and gated
        check_options(activation, gate_up == "apart" and gated, self.interleaved, limit)

        def linear(inputs: int, outputs: int) -> GroupedLinear:
            return GroupedLinear(num_experts, inputs, outputs, bias, **linear_options)

        if not gated:
            self.up = linear(hidden_size, ffn_size)
        elif gate_up == "apart":
            self.gate, self.up = linear(hidden_size, ffn_size), linear(hidden_size, ffn_size)
        else:
            self.gate_up = linear(hidden_size, 2 * ffn_size)
        self.down = linear(ffn_size, hidden_size)
        self._scales_output = bias  # weights * (h @ w + bias) is not (weights * h) @ w + bias

    def forward(
        self,
        x: Tensor,
        m_splits: Sequence[int] | Tensor | None = None,
        weights: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        *,
        offs: Tensor | None = None,
    ) -> Tensor:
        """weights[r] * the network of r's expert at x[r], for each row r.

        Args:
            x: [..., H] tokens by expert, as gmm.moe.permute() gives them; R rows in all.
            m_splits: sizes of the groups, as of GroupedLinear.forward(). Rows after the last group give zeros.
            weights: [R] routing weights, as gmm.moe.permute_weights() gives them; None: all are 1.
            is_first_microbatch: as of GroupedLinear.forward().
            offs: ends of the groups, in place of m_splits.

        Returns:
            As x.

        Raises:
            ValueError, RuntimeError: as GroupedLinear.forward() and gmm.moe.gated_activation().

        Does not synchronise. The weights enter with the activation, which costs nothing, or, with a bias, in a kernel
        of their own. With offs, or sizes on the device, "swiglu" on one concatenated parameter without bias and limit
        is gmm.moe.feed_forward(): the projections are not called then, unless they have hooks.
        """
        shape, x = x.shape, x.flatten(0, -2) if x.dim() > 2 else x
        if isinstance(m_splits, Tensor) and m_splits.device.type != "cpu" and offs is None:
            ends = self._projections()[0]._groups(x, m_splits, None)  # once for all projections
            assert isinstance(ends, Tensor)
            offs, m_splits = ends, None
        if (offs is not None or isinstance(m_splits, Tensor)) and self._is_one_call():
            rows, ends = self.gate_up._rows_and_groups(x, m_splits, offs)
            if isinstance(ends, Tensor):
                owned = self.gate_up._owns_weight_grads or self.down._owns_weight_grads
                one_call = self._one_call_with_owners if owned else self._one_call
                y = one_call(rows, ends, weights, bool(is_first_microbatch))
                return y.view(*shape[:-1], y.shape[-1])
        groups: dict[str, Any] = {"m_splits": m_splits, "offs": offs, "is_first_microbatch": is_first_microbatch}
        up = None
        if not KINDS[self.activation].gated:
            h = self.up(x, **groups)
        elif hasattr(self, "gate_up"):
            h = self.gate_up(x, **groups)
        else:
            h, up = self.gate(x, **groups), self.up(x, **groups)
        h = gated_activation(
            *(h, self.activation),
            up=up,
            interleaved=self.interleaved,
            limit=self.limit,
            weights=None if self._scales_output else weights,
            offs=offs,
        )
        y = self.down(h, **groups)
        if self._scales_output and weights is not None:
            y = gated_activation(y, "identity", weights=weights, offs=offs)
        return y.view(*shape[:-1], y.shape[-1])

    def _is_one_call(self) -> bool:
        """Whether gmm.moe.feed_forward() has ops of its own for this, and calling the projections would do no more."""
        if self.activation != "swiglu" or self.limit is not None or self.interleaved or not hasattr(self, "gate_up"):
            return False
        if (
            within_torch_func()
            or _has_any_global_hook()
            or not (_is_one_product(self.gate_up) and _is_one_product(self.down))
        ):
            return False
        gate_up, down = self.gate_up, self.down
        return gate_up.sm_margin == down.sm_margin and gate_up.in_features == down.out_features

    def _one_call(self, rows: Tensor, offs: Tensor, weights: Tensor | None, overwrite: bool) -> Tensor:
        gate_up, down = (linear._stacked("weight") for linear in (self.gate_up, self.down))
        check_no_tangents("GroupedExperts", rows, gate_up, down, weights)
        check_operands(rows, gate_up, down, offs, weights, True, True)
        owners = self.gate_up._owner(rows), self.down._owner(rows)
        return swiglu_feed_forward(rows, gate_up, down, offs, weights, True, self.gate_up.sm_margin, owners, overwrite)

    _one_call_with_owners = torch.compiler.disable(_one_call)

    def reset_parameters(self) -> None:
        """GroupedLinear.reset_parameters() of all projections."""
        for linear in self._projections():
            linear.reset_parameters()

    def backward_dw(self) -> None:
        """GroupedLinear.backward_dw() of all projections, last first."""
        for linear in reversed(self._projections()):
            linear.backward_dw()

    def _projections(self) -> list[GroupedLinear]:
        return [linear for linear in self.children() if isinstance(linear, GroupedLinear)]

    def extra_repr(self) -> str:
        """The activation."""
        text = f"activation={self.activation}"
        text += ", interleaved=True" if self.interleaved else ""
        return text if self.limit is None else f"{text}, limit={self.limit}"


def _is_one_product(linear: Any) -> bool:
    """Whether a call does nothing but multiply with one parameter."""
    if type(linear).forward is not GroupedLinear.forward or "forward" in vars(linear):
        return False
    hooks = linear._forward_pre_hooks or linear._forward_hooks or linear._backward_pre_hooks or linear._backward_hooks
    return not (hooks or linear.parameter_per_group or linear._names["bias"])
