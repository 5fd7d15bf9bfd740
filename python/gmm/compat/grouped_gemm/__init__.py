"""Takes the place of the package grouped_gemm, as Megatron-LM and MegaBlocks call it.

from gmm.compat import grouped_gemm as gg

gg.ops.gmm(tokens, weights, batch_sizes, trans_b=True)
gg.backend.gmm(tokens, grads, batch_sizes, trans_a=True)
gg.ops.permute(tokens, indices), gg.ops.unpermute(tokens, row_id_map, probs)
"""

from gmm.compat.grouped_gemm import backend, ops
from gmm.compat.grouped_gemm.ops import permute, unpermute

__all__ = ["backend", "ops", "permute", "unpermute"]
