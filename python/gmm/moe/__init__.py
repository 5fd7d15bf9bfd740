"""What surrounds the products of an MoE layer: the order of the tokens, and the activation between two products.

    x, row_map, offs = gmm.moe.permute(hidden, top_k_index, num_experts)
    weights = gmm.moe.permute_weights(top_k_weights, row_map)
    y = gmm.moe.feed_forward(x, gate_up, down, offs, weights)
    hidden = gmm.moe.unpermute(y, row_map)

where the third line is

    h = gmm.grouped_mm(x, gate_up, offs, trans_b=True)
    h = gmm.moe.gated_activation(h, "swiglu", weights=weights, offs=offs)
    y = gmm.grouped_mm(h, down, offs, trans_b=True)

No function here synchronises with the device. Each is one op or a few, in Triton where there is Triton for the device
and in plain torch elsewhere; all may be differentiated by autograd (not by torch.func, nor in forward mode: that
raises), compiled with fullgraph=True and captured in a CUDA graph.

routing.py has the order of the tokens, permute.py moves them, activation.py computes on them, and feed_forward.py joins
that with the products; row_kernels.py and activation_kernels.py are device code.
"""

from gmm.moe.activation import KINDS, gated_activation
from gmm.moe.feed_forward import feed_forward
from gmm.moe.permute import permute, permute_weights, unpermute
from gmm.moe.routing import route, route_sizes

__all__ = [
    "KINDS",
    "feed_forward",
    "gated_activation",
    "permute",
    "permute_weights",
    "route",
    "route_sizes",
    "unpermute",
]
