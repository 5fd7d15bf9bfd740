"""torchtitan: its experts through gmm, as an override of the configuration.

    --override.imports gmm.integrations.torchtitan.grouped_experts

It takes every GroupedExperts of the model, GptOssGroupedExperts too, and changes the seam that torchtitan has for this,
_grouped_mm, alone: parameters, checkpoints, sharding and token dispatch stay torchtitan's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gmm.grouped_mm import grouped_mm
from gmm.integrations._packages import require

_config = require("torchtitan.config", "torchtitan")
_moe = require("torchtitan.models.common.moe", "torchtitan")


@_config.override(target=_moe.GroupedExperts.Config, description="The experts' grouped GEMMs through gmm.")
def grouped_experts(config: Any) -> Any:
    """The same configuration, of experts that call gmm.grouped_mm."""
    return _config.derive(config, with_gmm(type(config)._owner).Config)


@functools.cache
def with_gmm(experts: type) -> Any:
    """The class of experts with its products by gmm."""

    base: Any = experts

    class Experts(base):
        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            pass

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            """[tokens, K] and [experts, K, N]."""
            return grouped_mm(A, B_t, offs)

    Experts.__name__ = Experts.__qualname__ = f"Gmm{experts.__name__}"
    Experts.Config.__qualname__ = f"{Experts.__name__}.Config"  # torchtitan's log names it
    return Experts
