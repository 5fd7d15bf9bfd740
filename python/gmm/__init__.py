"""Grouped GEMM for mixture-of-experts models: many matrix products of different sizes in one call.

gmm.grouped_mm(a, b, offs) takes the groups as slices of one buffer, whose ends lie in a tensor on the device;
gmm.multi_tensor_gemm(a, b) takes lists of matrices. gmm.explain(...) tells which kernel a call takes and why. gmm.moe
has what surrounds the products: permute, unpermute and the gated activation; gmm.nn modules of all that;
gmm.integrations the switches of other libraries.
The ops themselves are torch.ops.gmm.*.
"""

from gmm import integrations, moe, nn
from gmm._library import build_info
from gmm._library import version as _version
from gmm.backend import last_backend, use_backend
from gmm.explain import explain
from gmm.grouped_mm import grouped_mm
from gmm.ops import multi_tensor_gemm
from gmm.plan import Plan

__version__ = _version()

__all__ = [
    "Plan",
    "__version__",
    "build_info",
    "explain",
    "grouped_mm",
    "integrations",
    "last_backend",
    "moe",
    "multi_tensor_gemm",
    "nn",
    "use_backend",
]
