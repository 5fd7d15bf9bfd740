"""What surrounds the products of an MoE layer: the order of the tokens, and the activation between two products.

    x, row_map, offs = gmm.moe.permute(hidden, top_k_index, num_experts)
    h = gmm.grouped_mm(x, gate_up, offs, trans_b=True)
    h = gmm.moe.gated_activation(h, "swiglu", weights=gmm.moe.permute_weights(top_k_weights, row_map))
    hidden = gmm.moe.unpermute(gmm.grouped_mm(h, down, offs, trans_b=True), row_map)

No function here synchronises with the device. Each is one op or a few, in Triton where there is Triton for the device
and in plain torch elsewhere; all may be differentiated by autograd (not by torch.func, nor in forward mode: that
raises), compiled with fullgraph=True and captured in a CUDA graph.

routing.py has the order of the tokens, permute.py moves them, activation.py computes on them; row_kernels.py and
activation_kernels.py are their device code.
"""

from gmm.moe.activation import KINDS, gated_activation
from gmm.moe.permute import permute, permute_weights, unpermute
from gmm.moe.routing import route, route_sizes

__all__ = [
    "KINDS",
    "gated_activation",
    "permute",
    "permute_weights",
    "route",
    "route_sizes",
    "unpermute",
]
