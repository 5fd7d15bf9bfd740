"""Plans: what explain() returns, the plan of a call on lists, and how operands are told to gmm._core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gmm._library import core
from gmm.backend import TRITON_TAKES_NO_LISTS, check_reference, parse, resolve
from gmm.check import check_call, check_lengths, dtype_name
from gmm.ops import allows_tf32

Operand = Tensor | Sequence[int]  # a tensor, or a shape


@dataclass(frozen=True)
class Plan:
    """What a call does. str() makes a readable text of it.

    Attributes:
        backend: "cutlass", "triton", "cublas" or "reference".
        kernel: its name, as last_backend() gives it.
        tile: (M, N, K) that a CTA computes at a time; None where the backend does not say.
        launches: kernels, or cuBLAS calls.
        streams: that the work is spread over.
        workspace_bytes: of device memory, beside the operands.
        copies: operands copied first, or d copied back after, for want of a leading dimension.
        reasons: by backend: why it was not chosen; for the chosen one, why it was.
    """

    backend: str
    kernel: str
    tile: tuple[int, int, int] | None
    launches: int
    streams: int
    workspace_bytes: int
    copies: int
    reasons: dict[str, str] = field(hash=False)

    def __str__(self) -> str:
        def count(n: int, what: str) -> str:
            return f"{n} {what}" + ("" if n == 1 else "es" if what.endswith("h") else "s")

        parts = [f"{self.backend}: {self.kernel}", count(self.launches, "launch"), count(self.streams, "stream")]
        parts.append(f"{self.workspace_bytes} bytes of workspace")
        if self.copies:
            parts.append(f"{self.copies} contiguous {'copy' if self.copies == 1 else 'copies'}")
        width = max(map(len, self.reasons), default=0)
        return "\n".join([", ".join(parts), *(f"  {name:{width}}  {why}" for name, why in self.reasons.items())])


def plan_list(
    a: Sequence[Operand],
    b: Sequence[Operand],
    d: Sequence[Operand] | None,
    bias: Sequence[Operand] | None,
    *,
    trans_a: bool,
    trans_b: bool,
    accumulate: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    sm_margin: int,
    backend: str | None,
    sm: int | None,
    sm_count: int | None,
) -> Plan:
    """explain() for multi_tensor_gemm."""
    device = next((x.device for x in a if isinstance(x, Tensor)), torch.device("meta"))
    a_tensors, b_tensors = as_tensors(a, dtype), as_tensors(b, dtype)
    ab_dtype = a_tensors[0].dtype if a_tensors else dtype
    d_tensors = None if d is None else as_tensors(d, out_dtype or ab_dtype)
    d_dtype = d_tensors[0].dtype if d_tensors else out_dtype or ab_dtype
    biases = None if bias is None else as_tensors(bias, d_dtype)
    if a_tensors:
        lists = (a_tensors, b_tensors, d_tensors, biases)
        check_call(*lists, trans_a=trans_a, trans_b=trans_b, out_dtype=d_dtype, sm_margin=sm_margin)
    else:
        check_lengths(a_tensors, b_tensors, d_tensors, biases)
    if d_tensors is None:
        shapes = [(x.shape[trans_a], y.shape[not trans_b]) for x, y in zip(a_tensors, b_tensors, strict=True)]
        d_tensors = as_tensors(shapes, d_dtype)

    text = resolve(backend)
    ordinal = cuda_ordinal(device)
    if parse(text).name == "reference" or (sm is None and ordinal is None):
        return _reference_plan(text, device, len(a_tensors))

    def plan(name: str, kernel: str) -> core.PlanDict:
        return core.plan(
            [stored(x) for x in a_tensors],
            [stored(x) for x in b_tensors],
            [stored(x) for x in d_tensors],
            None if biases is None else [address(x) for x in biases],
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
        if choice.name == "triton":
            raise RuntimeError(f"backend 'triton' cannot take this call: {TRITON_TAKES_NO_LISTS}")
        result = plan(choice.name, choice.kernel)
    except RuntimeError:
        if not choice.fall_back:
            raise
        result = plan("auto", "")
    result["reasons"] |= {"triton": TRITON_TAKES_NO_LISTS, "reference": "for CPU tensors, or when asked for"}
    return Plan(**result)


def _reference_plan(text: str, device: torch.device, groups: int) -> Plan:
    check_reference(text, device)
    if parse(text).name == "reference":
        chosen, refused = "chosen: asked for", "not asked for"
    elif device.type == "meta":
        chosen, refused = "chosen: runs on any device", "this machine has no CUDA device; sm= plans for another"
    else:
        chosen, refused = "chosen: runs on any device", f"needs CUDA tensors, a[0] is on {device}"
    reasons = {"cutlass": refused, "triton": TRITON_TAKES_NO_LISTS, "cublas": refused, "reference": chosen}
    return Plan("reference", "torch.mm", None, groups, 1, 0, 0, reasons)


def as_tensors(operands: Sequence[Operand], dtype: torch.dtype) -> list[Tensor]:
    """Shapes become meta tensors."""
    return [as_tensor(x, dtype) for x in operands]


def as_tensor(x: Operand, dtype: torch.dtype, device: torch.device | str = "meta") -> Tensor:
    """A tensor stays, a shape becomes a contiguous tensor on the device."""
    return x if isinstance(x, Tensor) else torch.empty(tuple(x), dtype=dtype, device=device)


def cuda_ordinal(device: torch.device) -> int | None:
    """The CUDA device that a call on `device` runs on. After a fork CUDA has none for the child."""
    if device.type == "cuda":
        return device.index
    available = device.type == "meta" and torch.cuda.is_available() and not torch.cuda._is_in_bad_fork()
    return torch.cuda.current_device() if available else None


def stored(x: Tensor) -> tuple[int, int, int, int, int]:
    (rows, cols), (row_stride, col_stride) = x.shape, x.stride()
    return address(x), rows, cols, row_stride, col_stride


def address(x: Tensor) -> int:
    """Where x is; without CUDA memory, where it could be: its storage aligned as by torch's allocator."""
    return x.data_ptr() if x.is_cuda else int(2**20 + x.storage_offset() * x.element_size())


def stored_batch(x: Tensor) -> tuple[int, int, int, int, int, int]:
    """A matrix, or a batch of them."""
    group_stride = x.stride(0) if x.dim() == 3 else 0
    rows, cols = x.shape[-2:]
    return address(x), group_stride, rows, cols, x.stride(-2), x.stride(-1)
