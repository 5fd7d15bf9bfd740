"""Kernels of the ops for tensors that are not dense, and for written ones with the negative bit: they name the argument
and raise. The dispatcher calls them for no others, so that other calls pay nothing for the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gmm.check import check_dense, check_no_negative_bit

_OPS = ("multi_tensor_gemm", "multi_tensor_mm", "grouped_mm", "grouped_mm_out")
_NOT_DENSE = (
    *("SparseCPU", "SparseCUDA", "SparseXPU", "SparseMeta", "SparseCsrCPU", "SparseCsrCUDA", "SparseCsrXPU"),
    *("SparseCsrMeta", "MkldnnCPU", "QuantizedCPU", "QuantizedCUDA", "NestedTensorCPU", "NestedTensorCUDA"),
    *("NestedTensorXPU", "AutogradNestedTensor"),
)


def _tensors(op: Any, args: tuple[Any, ...], written: bool) -> Iterator[tuple[str, Tensor]]:
    """All that a call gets, or those that it writes, as errors name them: a, b[1]. They come first in each schema."""
    for argument, value in zip(op._schema.arguments, args):
        if written and not _is_written(argument):
            continue
        if isinstance(value, Tensor):
            yield argument.name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{argument.name}[{i}]", x) for i, x in enumerate(value))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _not_dense(op: Any) -> Callable[..., None]:
    def kernel(*args: Any, **_: Any) -> None:
        for name, x in _tensors(op, args, written=False):
            check_dense(name, x)

    return kernel


def _negative(op: Any) -> Callable[..., None]:
    """What is only read may have the bit: it is copied, as torch does for other ops."""

    def resolved(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [y.resolve_neg() for y in x]
        return x.resolve_neg() if isinstance(x, Tensor) else x

    def kernel(*args: Any, **options: Any) -> None:
        for name, x in _tensors(op, args, written=True):
            check_no_negative_bit(name, x)
        op(*map(resolved, args), **options)

    return kernel


_library = torch.library.Library("gmm", "IMPL")
for _op in (getattr(torch.ops.gmm, name).default for name in _OPS):
    for _key in _NOT_DENSE:
        _library.impl(_op, _not_dense(_op), _key)
    if any(map(_is_written, _op._schema.arguments)):
        _library.impl(_op, _negative(_op), "Negative")
