"""The checks of a call, before anything is written.

The CPU and fake kernels and explain() use them; the CUDA ops have the same in csrc/torch/check.h, with the same texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16, float32, ..."""
    return str(dtype).removeprefix("torch.")


def check_call(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    d: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] | None = None,
    *,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype | None = None,
    sm_margin: int = 0,
) -> torch.dtype:
    """Checks a call as in multi_tensor_gemm and returns the dtype of d. Works on symbolic sizes.

    Raises:
        RuntimeError: naming the argument, the group, what was expected and what came.
    """
    check_lengths(a, b, d, bias)
    ab_dtype = a[0].dtype
    check(ab_dtype in DTYPES, "a[0]: expected bfloat16, float16 or float32, got {}", dtype_name(ab_dtype))
    _check_list("a", a, 2, a[0], ab_dtype, "a[0]")
    _check_list("b", b, 2, a[0], ab_dtype, "a[0]")
    check(sm_margin >= 0, "sm_margin: expected >= 0, got {}", sm_margin)
    b_dim, a_dim = "columns" if trans_b else "rows", "rows" if trans_a else "columns"
    for i in range(len(a)):
        k, got = a[i].shape[not trans_a], b[i].shape[trans_b]
        check(k == got, "b[{}]: expected {} {} (a[{}] has {} {}), got {}", i, k, b_dim, i, k, a_dim, got)
    if d is not None:
        d_dtype = _check_d(a, b, d, trans_a, trans_b)
    else:
        d_dtype = out_dtype or ab_dtype
        check_d_dtype("out_dtype", d_dtype, ab_dtype)
    if bias is not None:
        _check_list("bias", bias, 1, a[0], d_dtype, "d")
        for i, x in enumerate(bias):
            n = b[i].shape[not trans_b]
            check(x.shape[0] == n, "bias[{}]: expected {} elements, got {}", i, n, x.shape[0])
    return d_dtype


def check_lengths(
    a: Sequence[Tensor], b: Sequence[Tensor], d: Sequence[Tensor] | None, bias: Sequence[Tensor] | None
) -> None:
    """All lists have as many tensors as a."""
    for name, tensors in (("b", b), ("d", d), ("bias", bias)):
        if tensors is not None and len(tensors) != len(a):
            raise RuntimeError(f"{name}: expected length {len(a)} (that of a), got {len(tensors)}")


def check(condition: bool | torch.SymBool, text: str, *values: object) -> None:
    """RuntimeError unless the condition holds. One on symbolic sizes becomes a guard or a run-time check."""
    if condition is not True:
        torch._check(condition, lambda: text.format(*values))


def _check_list(name: str, tensors: Sequence[Tensor], dim: int, a0: Tensor, dtype: torch.dtype, like: str) -> None:
    """Rank, device and dtype of a whole list; `like` names the tensor whose dtype it must have."""
    for i, x in enumerate(tensors):
        check_dense(f"{name}[{i}]", x)
        dims = "dimension" if dim == 1 else "dimensions"
        check(x.dim() == dim, "{}[{}]: expected {} {}, got {}", name, i, dim, dims, x.dim())
        check(
            x.device == a0.device,
            "{}[{}]: expected a tensor on {} (where a[0] is), got one on {}",
            *(name, i, a0.device, x.device),
        )
        if x.dtype != dtype:
            expected, got = dtype_name(dtype), dtype_name(x.dtype)
            raise RuntimeError(f"{name}[{i}]: expected {expected} (the dtype of {like}), got {got}")


def check_d_dtype(name: str, dtype: torch.dtype, ab_dtype: torch.dtype, like: str = "a[0]") -> None:
    """The dtype of a result: that of the operands, or float32."""
    if dtype not in (ab_dtype, torch.float32):
        expected, got = dtype_name(ab_dtype), dtype_name(dtype)
        raise RuntimeError(f"{name}: expected {expected} (the dtype of {like}) or float32, got {got}")


def _check_d(
    a: Sequence[Tensor], b: Sequence[Tensor], d: Sequence[Tensor], trans_a: bool, trans_b: bool
) -> torch.dtype:
    for i, x in enumerate(d):
        check_d_dtype(f"d[{i}]", x.dtype, a[0].dtype)
    _check_list("d", d, 2, a[0], d[0].dtype, "d[0]")
    for i, x in enumerate(d):
        m, n = a[i].shape[trans_a], b[i].shape[not trans_b]
        for size, expected in zip(x.shape, (m, n), strict=True):
            check(size == expected, "d[{}]: expected shape [{}, {}], got {}", i, m, n, list(x.shape))
        check_no_overlap(f"d[{i}]", x)
    lists = {"d": d, "a": a, "b": b}
    named = {name: {f"{name}[{i}]": x for i, x in enumerate(tensors)} for name, tensors in lists.items()}
    check_own_memory(named["d"], named["a"] | named["b"])
    return d[0].dtype


def check_dense(name: str, x: Tensor) -> None:
    """Whether its elements are where its strides say."""
    if x.is_nested or x.is_quantized or x.layout is not torch.strided:
        kind = "a nested one" if x.is_nested else "a quantized one" if x.is_quantized else f"layout {x.layout}"
        raise RuntimeError(f"{name}: expected a dense tensor, got {kind}")


def check_no_negative_bit(name: str, x: Tensor) -> None:
    """A kernel would write the values themselves, which are read with the other sign."""
    if x.is_neg():
        raise RuntimeError(f"{name}: expected a tensor without the negative bit, got one with it; see resolve_neg()")


def check_not_inference(name: str, x: Tensor) -> None:
    """torch lets nobody write into an inference tensor outside of inference mode, but does not look at custom ops."""
    if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(f"{name}: expected a normal tensor outside of inference mode, got an inference tensor")


def check_no_tangents(function: str, *tensors: Tensor | None) -> None:
    """Of functions on ops of torch.library, which have no forward mode: torch would let tangents vanish silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{function}: expected tensors without tangents: it has no forward-mode derivative")


def check_no_overlap(name: str, x: Tensor) -> None:
    """Whether each element of what is written has memory of its own."""
    expected = "{}: expected elements that do not share memory, got shape {} with strides {}"
    check(not may_overlap_itself(x), expected, name, list(x.shape), list(x.stride()))


def check_own_memory(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Whether what is written, by name, begins where nothing else does. That other elements are apart is the caller's
    part, as views may interleave."""
    begins: dict[tuple[int, int], str] = {}
    for name, x in (written | read).items():
        begin = _begin(x)
        if begin is None:
            continue
        before = begins.get(begin)
        if before is not None:
            first, other = (name, before) if name in written else (before, name)
            raise RuntimeError(f"{first}: expected memory of its own, got that of {other}")
        if name in written:
            begins[begin] = name


def _begin(x: Tensor) -> tuple[int, int] | None:
    """The storage, and the first element's byte in it. None without elements, or with symbolic sizes."""
    offset = x.storage_offset()
    if not isinstance(x.numel(), int) or not isinstance(offset, int) or not x.numel():
        return None
    return x.untyped_storage()._cdata, offset * x.element_size()


def may_overlap_itself(x: Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor. Symbolic strides count as in order."""
    if not all(isinstance(size, int) for size in (*x.shape, *x.stride())) or x.numel() == 0:
        return False
    span = 0  # from the first to the last element of the dimensions so far
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= span:
            return True
        span += (size - 1) * stride
    return False
