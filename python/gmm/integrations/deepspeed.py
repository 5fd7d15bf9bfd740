"""DeepSpeed: the experts of its expert parallelism (AutoEP) through gmm.

    gmm.integrations.deepspeed.register()
    config = {"expert_parallel": {"enabled": True, "use_grouped_mm": "gmm", ...}, ...}
    deepspeed.initialize(model=model, config=config)

register() teaches deepspeed.moe.ep_experts.GroupedExperts the value "gmm" of its field use_grouped_mm; True and False
stay what they are. Nothing is padded: counts need not be multiples of 8.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gmm.grouped_mm import grouped_mm
from gmm.integrations._packages import require


def register() -> None:
    """Makes "use_grouped_mm": "gmm" select gmm. May be called again.

    Raises:
        ImportError: no DeepSpeed, or one without AutoEP.
    """
    module = require("deepspeed.moe.ep_experts", "deepspeed")
    original = module.GroupedExperts.forward
    if getattr(original, "knows_gmm", False):
        return

    @functools.wraps(original)
    def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        if self.use_grouped_mm == "gmm":
            return _run_experts(module, self, x, num_tokens_per_expert)
        return original(self, x, num_tokens_per_expert)

    forward.knows_gmm = True  # type: ignore[attr-defined]
    module.GroupedExperts.forward = forward


def _run_experts(module: Any, experts: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """The experts' feed-forward: [tokens, dim], sorted by expert."""
    offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    w1, w2, w3 = (w.to(x.dtype) for w in (experts.w1, experts.w2, experts.w3))
    form = (experts.activation, experts.activation_alpha, experts.activation_limit)
    fused = x.device.type != "cpu"  # DeepSpeed's activation kernels
    if experts.gate_up_impl == "fused":
        gate_up = grouped_mm(x, torch.cat([w1, w3], dim=1), offs, trans_b=True)
        h = module.apply_packed_expert_activation(gate_up, *form, fused=fused)
    else:
        gate, up = (grouped_mm(x, w, offs, trans_b=True) for w in (w1, w3))
        h = module.apply_expert_activation(gate, up, *form, fused=fused)
    return grouped_mm(h, w2, offs, trans_b=True)


def group_gemm_triton(mat_a: Tensor, mat_b: Tensor, offs: Tensor, trans_b: bool = False) -> Tensor:
    """Takes the place of deepspeed.ops.triton_ops.group_gemm_triton: mat_a [M, K], mat_b [E, K, N], or [E, N, K] with
    trans_b, of any strides; offs [E], the groups' ends. Returns [M, N]. Differentiable; never synchronises.

    Raises:
        RuntimeError: as gmm.grouped_mm.
    """
    return grouped_mm(mat_a, mat_b, offs, trans_b=trans_b)
