"""Grouped GEMM for mixture-of-experts models: many matrix products of different sizes in one call.

gmm.multi_tensor_gemm(a, b) is the one to start with; gmm.explain(...) tells which kernel a call takes and why.
The ops themselves are torch.ops.gmm.*.
"""

from gmm._library import build_info
from gmm._library import version as _version
from gmm.backend import last_backend, use_backend
from gmm.explain import Plan, explain
from gmm.ops import multi_tensor_gemm

__version__ = _version()

__all__ = ["Plan", "__version__", "build_info", "explain", "last_backend", "multi_tensor_gemm", "use_backend"]
