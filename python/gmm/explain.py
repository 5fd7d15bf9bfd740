"""gmm.explain: which backend and kernel a call takes, and why each other was refused. Also without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gmm._library import core
from gmm.backend import check_reference, parse, resolve
from gmm.check import check_call, check_lengths, dtype_name
from gmm.ops import allows_tf32

Operand = Tensor | Sequence[int]  # a tensor, or a shape


@dataclass(frozen=True)
class Plan:
    """What a call does. str() makes a readable text of it."""

    backend: str
    kernel: str
    tile: tuple[int, int, int] | None  # of D and K, that a CTA computes at a time
    launches: int  # kernels, or cuBLAS calls
    streams: int  # that the work is spread over
    workspace_bytes: int
    copies: int  # operands copied first, or d copied back after, for want of a leading dimension
    reasons: dict[str, str] = field(hash=False)  # by backend: why it was not chosen; for the chosen one, why it was

    def __str__(self) -> str:
        def count(n: int, what: str) -> str:
            return f"{n} {what}" + ("" if n == 1 else "es" if what.endswith("h") else "s")

        parts = [f"{self.backend}: {self.kernel}", count(self.launches, "launch"), count(self.streams, "stream")]
        parts.append(f"{self.workspace_bytes} bytes of workspace")
        if self.copies:
            parts.append(f"{self.copies} contiguous {'copy' if self.copies == 1 else 'copies'}")
        width = max(map(len, self.reasons), default=0)
        return "\n".join([", ".join(parts), *(f"  {name:{width}}  {why}" for name, why in self.reasons.items())])


def explain(
    a: Sequence[Operand],
    b: Sequence[Operand],
    d: Sequence[Operand] | None = None,
    bias: Sequence[Operand] | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    sm_margin: int = 0,
    backend: str | None = None,
    sm: int | None = None,
    sm_count: int | None = None,
) -> Plan:
    """Which backend and kernel gmm.multi_tensor_gemm takes for a call, and why, without running it.

    gmm.explain([(512, 2048)] * 128, [(1536, 2048)] * 128, trans_b=True, sm=90) needs no GPU.

    Args:
        a, b, d, bias: as in multi_tensor_gemm; each list holds tensors, on any device, or shapes of contiguous tensors
            (stored shapes: [K, M] with trans_a).
        trans_a, trans_b, accumulate, out_dtype, sm_margin, backend: as in multi_tensor_gemm.
        dtype: of a and b where they are shapes. d and bias are then of out_dtype.
        sm: compute capability to plan for, major * 10 + minor: 90 for H100 and H200. None: the device of the tensors;
            for shapes and meta tensors the current CUDA device, or the CPU on a machine without.
        sm_count: its multiprocessors; None: typical for that architecture. Only with sm.

    Returns:
        The plan. Memory of shapes, and of tensors that are not on a CUDA device, counts as aligned up to the storage
        offset.

    Raises:
        As multi_tensor_gemm, when it would. Does not synchronise.
    """
    if sm is None and sm_count is not None:
        raise ValueError(f"sm_count: expected None without sm, got {sm_count}")
    device = next((x.device for x in a if isinstance(x, Tensor)), torch.device("meta"))
    a_tensors, b_tensors = _as_tensors(a, dtype), _as_tensors(b, dtype)
    ab_dtype = a_tensors[0].dtype if a_tensors else dtype
    d_tensors = None if d is None else _as_tensors(d, out_dtype or ab_dtype)
    d_dtype = d_tensors[0].dtype if d_tensors else out_dtype or ab_dtype
    biases = None if bias is None else _as_tensors(bias, d_dtype)
    if a_tensors:
        lists = (a_tensors, b_tensors, d_tensors, biases)
        check_call(*lists, trans_a=trans_a, trans_b=trans_b, out_dtype=d_dtype, sm_margin=sm_margin)
    else:
        check_lengths(a_tensors, b_tensors, d_tensors, biases)
    if d_tensors is None:
        shapes = [(x.shape[trans_a], y.shape[not trans_b]) for x, y in zip(a_tensors, b_tensors, strict=True)]
        d_tensors = _as_tensors(shapes, d_dtype)

    text = resolve(backend)
    ordinal = _cuda_ordinal(device)
    if parse(text).name == "reference" or (sm is None and ordinal is None):
        return _reference_plan(text, device, len(a_tensors))

    def plan(name: str, kernel: str) -> core.PlanDict:
        return core.plan(
            [_stored(x) for x in a_tensors],
            [_stored(x) for x in b_tensors],
            [_stored(x) for x in d_tensors],
            None if biases is None else [_address(x) for x in biases],
            ab_dtype=dtype_name(ab_dtype),
            d_dtype=dtype_name(d_dtype),
            trans_a=trans_a,
            trans_b=trans_b,
            accumulate=accumulate,
            allow_tf32=ab_dtype is torch.float32 and allows_tf32(),
            sm_margin=sm_margin,
            device=ordinal or 0,
            backend=name,
            kernel=kernel,
            sm=sm,
            sm_count=sm_count or 0,
        )

    choice = parse(text)
    try:
        result = plan(choice.name, choice.kernel)
    except RuntimeError:
        if not choice.fall_back:
            raise
        result = plan("auto", "")
    result["reasons"]["reference"] = "for CPU tensors, or when asked for"
    return Plan(**result)


def _as_tensors(operands: Sequence[Operand], dtype: torch.dtype) -> list[Tensor]:
    """Shapes become meta tensors."""
    return [x if isinstance(x, Tensor) else torch.empty(tuple(x), dtype=dtype, device="meta") for x in operands]


def _cuda_ordinal(device: torch.device) -> int | None:
    """The CUDA device that a call on `device` runs on."""
    if device.type == "cuda":
        return device.index
    return torch.cuda.current_device() if device.type == "meta" and torch.cuda.is_available() else None


def _stored(x: Tensor) -> tuple[int, int, int, int, int]:
    (rows, cols), (row_stride, col_stride) = x.shape, x.stride()
    return _address(x), rows, cols, row_stride, col_stride


def _address(x: Tensor) -> int:
    """Where x is; without CUDA memory, where it could be: its storage aligned as by torch's allocator."""
    return x.data_ptr() if x.is_cuda else int(2**20 + x.storage_offset() * x.element_size())


def _reference_plan(text: str, device: torch.device, groups: int) -> Plan:
    check_reference(text, device)
    if parse(text).name == "reference":
        chosen, refused = "chosen: asked for", "not asked for"
    elif device.type == "meta":
        chosen, refused = "chosen: runs on any device", "this machine has no CUDA device; sm= plans for another"
    else:
        chosen, refused = "chosen: runs on any device", f"needs CUDA tensors, a[0] is on {device}"
    reasons = {"cutlass": refused, "cublas": refused, "reference": chosen}
    return Plan("reference", "torch.mm", None, groups, 1, 0, 0, reasons)
