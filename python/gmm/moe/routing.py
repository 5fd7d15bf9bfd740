"""Where each (token, choice) pair lies once the pairs are sorted by expert, and where each expert's rows end."""

from __future__ import annotations

import torch
from torch import Tensor

from gmm.check import check, dtype_name
from gmm.moe.launch import route_in_triton, takes
from gmm.moe.register import register
from gmm.ragged.check import CHECKS_OFFSETS

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def route_sizes(top_k_index: Tensor, num_experts: int) -> Tensor:
    """The ends of the experts' rows: offs[e] is the number of pairs whose expert is at most e.

    Args:
        top_k_index: expert of each pair, integers of any shape. num_experts and negative ids are sentinels: pairs of
            experts that other processes hold. They count nowhere.
        num_experts: E.

    Returns:
        [E], int32, on the device of top_k_index: what grouped_mm takes as offs. Equal from run to run.

    Raises:
        RuntimeError: top_k_index is not of integers; num_experts is negative; an id is larger than num_experts, where
            that is known without a synchronisation (on a CPU), or with GMM_CHECK_OFFSETS=1.
    """
    return _route_sizes(top_k_index, num_experts)


def route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order in which an expert's rows lie together: by expert, then by token, then by choice.

    Args:
        top_k_index: [T, k] expert of each token's choices, integers; sentinels as in route_sizes.
        num_experts: E.

    Returns:
        row_map: [T, k], int32: the row of each pair, a permutation of 0..T*k-1. The rows of sentinels come after all
            others; where the pair is one, row_map has ~row, which is negative.
        offs: [E], int32: as of route_sizes.

    Raises:
        RuntimeError: as route_sizes; top_k_index has not 2 dimensions; 2^31 or more pairs.
    """
    return _route(top_k_index, num_experts)


def _check(top_k_index: Tensor, num_experts: int) -> None:
    dtype = top_k_index.dtype
    check(dtype in _INTEGERS, "top_k_index: expected integers, got {}", dtype_name(dtype))
    check(num_experts >= 0, "num_experts: expected >= 0, got {}", num_experts)


def _check_matrix(top_k_index: Tensor, num_experts: int) -> None:
    check(top_k_index.dim() == 2, "top_k_index: expected 2 dimensions, [tokens, k], got {}", top_k_index.dim())
    pairs = top_k_index.shape[0] * top_k_index.shape[1]
    check(pairs < 2**31, "top_k_index: expected fewer than 2^31 pairs, got {}", pairs)
    _check(top_k_index, num_experts)


def _check_ids(top_k_index: Tensor, num_experts: int) -> None:
    """Where that needs no synchronisation, or was asked for."""
    if (top_k_index.device.type == "cpu" or CHECKS_OFFSETS) and top_k_index.numel() > 0:
        largest = int(top_k_index.max())
        expected = "top_k_index: expected ids up to {} (num_experts, which stands for no expert), got {}"
        check(largest <= num_experts, expected, num_experts, largest)


def _keys(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Flat ids as int64, num_experts for every sentinel."""
    ids = top_k_index.reshape(-1).long()
    return torch.where((ids < 0) | (ids > num_experts), num_experts, ids)


def _route_in_torch(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    keys, order = _keys(top_k_index, num_experts).sort(stable=True)
    experts = torch.arange(num_experts, device=keys.device)
    offs = torch.searchsorted(keys, experts, right=True).int()
    rows = torch.arange(keys.numel(), dtype=torch.int32, device=keys.device)
    rows = torch.where(keys == num_experts, ~rows, rows)
    return torch.empty_like(rows).scatter_(0, order, rows).view(top_k_index.shape), offs


def _route_kernel(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    _check_matrix(top_k_index, num_experts)
    _check_ids(top_k_index, num_experts)
    if takes(top_k_index) and num_experts > 0:
        return route_in_triton(top_k_index, num_experts)
    return _route_in_torch(top_k_index, num_experts)


def _route_sizes_kernel(top_k_index: Tensor, num_experts: int) -> Tensor:
    _check(top_k_index, num_experts)
    _check_ids(top_k_index, num_experts)
    keys = _keys(top_k_index, num_experts)
    sizes = torch.zeros(num_experts + 1, dtype=torch.int32, device=keys.device)
    sizes = sizes.scatter_add(0, keys, torch.ones_like(keys, dtype=torch.int32))  # bincount would synchronise
    return sizes[:num_experts].cumsum(0, dtype=torch.int32)


def _route_sizes_fake(top_k_index: Tensor, num_experts: int) -> Tensor:
    _check(top_k_index, num_experts)
    return top_k_index.new_empty((num_experts,), dtype=torch.int32)


def _route_fake(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    _check_matrix(top_k_index, num_experts)
    row_map = top_k_index.new_empty(top_k_index.shape, dtype=torch.int32)
    return row_map, top_k_index.new_empty((num_experts,), dtype=torch.int32)


_ARGUMENTS = "(Tensor top_k_index, SymInt num_experts)"
_route_sizes = register("moe_route_sizes", f"{_ARGUMENTS} -> Tensor", _route_sizes_kernel, _route_sizes_fake)
_route = register("moe_route", f"{_ARGUMENTS} -> (Tensor, Tensor)", _route_kernel, _route_fake)
