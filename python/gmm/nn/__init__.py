"""Modules: GroupedLinear, a linear map for each group of rows, and GroupedExperts, the feed-forward of an MoE layer.

linear.py and experts.py have the modules, products.py what GroupedLinear computes and how its gradients reach the
parameters.
"""

from gmm.nn.experts import GroupedExperts
from gmm.nn.linear import GroupedLinear

__all__ = ["GroupedExperts", "GroupedLinear"]
