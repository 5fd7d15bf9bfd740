"""gmm.h for Python: with a workspace of the caller's, which the torch ops allocate themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import gmm

SUCCESS, UNSUPPORTED = 0, 2
LIST, RAGGED_M, RAGGED_K = 0, 1, 2
AUTO, CUTLASS, CUBLAS = 0, 1, 2
DTYPE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Matrix(Structure):
    """gmm_matrix."""

    _fields_ = [("data", c_void_p), ("rows", c_int64), ("cols", c_int64), ("ld", c_int64), ("column_major", c_int32)]

    @staticmethod
    def of(x: Tensor) -> Matrix:
        """A matrix with stride 1 in one dimension; of a batch, the first."""
        rows, columns = x.shape[-2:]
        column_major = x.stride(-1) != 1
        ld = x.stride(-1) if column_major else x.stride(-2)
        return Matrix(x.data_ptr() or None, rows, columns, max(ld, rows if column_major else columns, 1), column_major)


class Args(Structure):
    """gmm_args."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("num_groups", c_int32),
        ("a", POINTER(Matrix)),
        ("b", POINTER(Matrix)),
        ("d", POINTER(Matrix)),
        ("bias", POINTER(c_void_p)),
        ("ab_dtype", c_int32),
        ("d_dtype", c_int32),
        ("accumulate", c_int32),
        ("allow_tf32", c_int32),
        ("sm_margin", c_int32),
        ("device", c_int32),
        ("backend", c_int32),
        ("kernel", c_char_p),
        ("allocate", c_void_p),
        ("allocate_context", c_void_p),
        ("form", c_int32),
        ("offs", c_void_p),
        ("offs_int64", c_int32),
        ("stride_b", c_int64),
        ("stride_d", c_int64),
        ("stride_bias", c_int64),
        ("epilogue", c_int32),
        ("h", Matrix),
        ("row_weights", c_void_p),
        ("row_sums", c_void_p),
    ]


class Device(Structure):
    """gmm_device."""

    _fields_ = [("struct_size", c_size_t), ("sm", c_int32), ("sm_count", c_int32)]


class PlanResult(Structure):
    """gmm_plan_result."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("kernel", c_char * 96),
        ("tile", c_int32 * 3),
        ("launches", c_int32),
        ("streams", c_int32),
        ("workspace_bytes", c_size_t),
        ("reason", c_char * 256 * 3),
    ]


library = ctypes.CDLL(str(Path(gmm.__file__).with_name("libgmm.so")))
library.gmm_last_error.restype = c_char_p
library.gmm_multi_tensor_gemm.argtypes = [POINTER(Args), c_void_p, c_size_t, c_void_p]


class Operands(NamedTuple):
    """A call's tensors as they enter the product: lists of matrices, or of one element in the ragged forms."""

    a: Sequence[Tensor]
    b: Sequence[Tensor]
    d: Sequence[Tensor]
    bias: Sequence[Tensor] | None = None
    offs: Tensor | None = None


def arguments(x: Operands, form: int, *, accumulate: bool, kernel: str = "", backend: int = CUTLASS) -> Args:
    """gmm_args of the call. Keep `x` as long as they are used."""
    args = Args(ctypes.sizeof(Args))
    args.num_groups = len(x.a) if x.offs is None else len(x.offs)
    for name, tensors in (("a", x.a), ("b", x.b), ("d", x.d)):
        setattr(args, name, (Matrix * len(tensors))(*map(Matrix.of, tensors)))
    if x.bias is not None:
        args.bias = (c_void_p * len(x.bias))(*(t.data_ptr() for t in x.bias))
        args.stride_bias = x.bias[0].stride(0) if x.offs is not None else 0
    args.ab_dtype, args.d_dtype = DTYPE[x.a[0].dtype], DTYPE[x.d[0].dtype]
    args.accumulate, args.backend, args.form = accumulate, backend, form
    args.kernel = kernel.encode() if kernel else None
    args.device = x.a[0].device.index or 0
    if x.offs is not None:
        args.offs, args.offs_int64 = x.offs.data_ptr(), x.offs.dtype is torch.int64
        args.stride_b = x.b[0].stride(0) if form == RAGGED_M else 0
        args.stride_d = x.d[0].stride(0) if form == RAGGED_K else 0
    return args


def plan(args: Args, sm: int | None = None) -> PlanResult | None:
    """The plan, on this machine's device or for another architecture. None where the backend refuses the call.

    Raises:
        RuntimeError: for an invalid call.
    """
    result = PlanResult(ctypes.sizeof(PlanResult))
    device = Device(ctypes.sizeof(Device), sm or 0, 0)
    status = library.gmm_plan(ctypes.byref(args), ctypes.byref(device) if sm else None, ctypes.byref(result))
    if status not in (SUCCESS, UNSUPPORTED):
        raise RuntimeError(library.gmm_last_error().decode())
    return result if status == SUCCESS else None


def run(args: Args, workspace: Tensor) -> None:
    """Runs the call on torch's current stream, with that workspace.

    Raises:
        RuntimeError: with the text of the error.
    """
    stream = torch.cuda.current_stream(workspace.device).cuda_stream
    if library.gmm_multi_tensor_gemm(ctypes.byref(args), workspace.data_ptr(), workspace.numel(), stream) != SUCCESS:
        raise RuntimeError(library.gmm_last_error().decode())
