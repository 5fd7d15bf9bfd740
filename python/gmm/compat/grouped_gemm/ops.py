"""grouped_gemm.ops: the differentiable functions."""

from __future__ import annotations

import torch
from torch import Tensor

from gmm.check import check_no_tangents
from gmm.compat.grouped_gemm.backend import ends
from gmm.grouped_mm import grouped_mm
from gmm.moe import unpermute as combine


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    """a[g] @ b[g] of each group g, which owns the next batch_sizes[g] rows of a: [tokens, N].

    Args:
        a: [tokens, K]; bfloat16, as the old package wants it, float16 or float32.
        b: [E, K, N], or [E, N, K] with trans_b.
        batch_sizes: [E], integers, on the CPU, as the old package wants them, or on a's device.
        trans_b: each b[g] is stored [N, K].

    Raises:
        RuntimeError: as backend.ends() and gmm.grouped_mm.

    Differentiable in a and b. Never synchronises with the device.
    """
    return grouped_mm(a, b, ends(batch_sizes, a), trans_b=trans_b)


def permute(
    input_act: Tensor, indices: Tensor, num_out_tokens: int | None = None, max_token_num: int = 0
) -> tuple[Tensor, Tensor]:
    """Copies each token to a row for each of its experts, sorted by expert: by token within one.

    Args:
        input_act: [T, H]; bfloat16, float16 or float32.
        indices: [T, k] expert of each choice, or [T] for k = 1; any integers.
        num_out_tokens: rows to keep, of the first experts; None or 0: all T * k.
        max_token_num: for callers of the old package, which allocates memory ahead by it. Without effect here.

    Returns:
        permuted: [num_out_tokens, H].
        row_id_map: [k * T], int32, choices before tokens: the row of choice j of token t is row_id_map[j * T + t],
            and negative where it was not kept.

    Raises:
        RuntimeError: shapes, dtypes or devices contradict.

    Differentiable in input_act. Never synchronises with the device.
    """
    check_no_tangents("permute", input_act)
    indices = indices.view(-1, 1) if indices.dim() == 1 else indices
    if indices.dim() != 2 or indices.shape[0] != input_act.shape[0]:
        expected = f"[{input_act.shape[0]}, k] (input_act has {input_act.shape[0]} rows)"
        raise RuntimeError(f"indices: expected shape {expected}, got {list(indices.shape)}")
    kept = num_out_tokens or indices.numel()
    if not 0 <= kept <= indices.numel():
        raise RuntimeError(f"num_out_tokens: expected 0 to {indices.numel()} (the elements of indices), got {kept}")
    # Not gmm.moe.route, which must know the number of experts: here nobody tells, and to look would synchronise.
    order = indices.reshape(-1).argsort(stable=True)
    rows = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    rows = torch.where(rows < kept, rows, ~rows)
    row_map = torch.empty_like(rows).scatter_(0, order, rows).view(indices.shape)
    return torch.ops.gmm.moe_permute(input_act, row_map, None, kept), row_map.t().reshape(-1)


def unpermute(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: [T, H], in the dtype of input_act, summed in float32.

    Args:
        input_act: [rows, H], in permute()'s order.
        row_id_map: [k * T], from permute(). Rows that were not kept add nothing.
        probs: [T, k] weights, bfloat16, float16 or float32; None: k is 1, and all are 1.

    Raises:
        RuntimeError: shapes, dtypes or devices contradict.

    Differentiable in input_act and probs; equal from run to run. Never synchronises with the device.
    """
    if probs is not None and probs.dim() != 2:
        raise RuntimeError(f"probs: expected 2 dimensions, got {probs.dim()}")
    top_k = 1 if probs is None else probs.shape[1]
    tokens = row_id_map.numel() if probs is None else probs.shape[0]
    if row_id_map.numel() != tokens * top_k:
        raise RuntimeError(f"row_id_map: expected {tokens * top_k} elements (those of probs), got {row_id_map.numel()}")
    return combine(input_act, row_id_map.view(top_k, tokens).t().contiguous(), probs)
