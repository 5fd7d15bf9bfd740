"""The control plane in C++, without torch: what csrc/pybind/core.cpp exports."""

from collections.abc import Sequence
from typing import TypedDict

# Address, rows, cols, row stride, column stride; strides in elements.
_Stored = tuple[int, int, int, int, int]

# Address, group stride, rows, cols, row stride, column stride.
_Batched = tuple[int, int, int, int, int, int]

class PlanDict(TypedDict):
    backend: str
    kernel: str
    tile: tuple[int, int, int] | None
    launches: int
    streams: int
    workspace_bytes: int
    copies: int
    reasons: dict[str, str]

def plan(
    a: Sequence[_Stored],
    b: Sequence[_Stored],
    d: Sequence[_Stored],
    bias: Sequence[int] | None,
    *,
    ab_dtype: str,
    d_dtype: str,
    trans_a: bool,
    trans_b: bool,
    accumulate: bool,
    allow_tf32: bool,
    sm_margin: int,
    device: int,
    backend: str,
    kernel: str,
    sm: int | None,
    sm_count: int,
) -> PlanDict: ...
def plan_grouped(
    *,
    mode: str,
    groups: int,
    a: _Batched,
    b: _Batched,
    d: _Batched,
    bias: tuple[int, int, int] | None,
    ab_dtype: str,
    d_dtype: str,
    offs_int64: bool,
    accumulate: bool,
    sm_margin: int,
    device: int,
    kernel: str,
    epilogue: str,
    sm: int | None,
    sm_count: int,
) -> PlanDict | str: ...
def build_info() -> dict[str, str]: ...
def version() -> str: ...
def last_backend() -> str: ...
def set_last_backend(text: str) -> None: ...
