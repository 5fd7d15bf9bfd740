"""The Triton backend below the public API: on the CPU in Triton's interpreter, on a GPU compiled.

Values are compared with fp64 by the bound that check.py derives; outputs start as NaN, inside buffers of canaries.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from check import CANARY, same_bits, seeded
from grouped_cases import COUNTS, MODES, ODD_SIZES, conformance, expected, operands, out_shape
from torch import Tensor

import gmm.triton
from gmm.triton import cache, call, configs, launch
from gmm.triton.configs import Config

pytest.importorskip("triton")
pytest.importorskip("numpy")  # the interpreter's

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
SMALL = Config(16, 16, 16, 4, 2, group_m=2)  # many tiles in few elements

modes = pytest.mark.parametrize("mode", MODES)
dtypes = pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU stands for the interpreter."""
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    device = torch.device(request.param)
    assert gmm.triton.supports(device) is None
    return device


def check(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    config: Config | None = None,
    tf32: bool = False,
) -> Tensor:
    """Runs a call into a guarded out, NaN before unless accumulating, and compares."""
    shape, dtype = out_shape(a, b, offs), out_dtype or a.dtype
    guard = None
    if out is None:
        guard = torch.full((math.prod(shape) + 128,), CANARY, dtype=dtype, device=a.device)
        out = guard[64 : math.prod(shape) + 64].view(shape)
    generator = seeded(torch.device("cpu"), 1)
    out.copy_(torch.randn(shape, generator=generator)) if accumulate else out.fill_(NAN)
    exact, bound = expected(a, b, offs, out, bias, accumulate)
    bound = bound + (2.0**-9 * exact.abs().max() if tf32 and exact.numel() else 0)
    launch.run(a, b, offs, out, bias, accumulate, tf32, config)
    result = out.clone()
    wrong = ~torch.where(exact.isfinite(), (result.double() - exact).abs() <= bound, result.isnan() | (result == exact))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        pytest.fail(f"{int(wrong.sum())} of {wrong.numel()} wrong, first {at}: {result[at]}, exact {exact[at]}")
    if guard is not None:
        out.fill_(CANARY)
        assert (guard == CANARY).all(), "written outside of out"
    return result


# torch's own table.


@modes
@dtypes
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("a_row_major", [False, True])
@pytest.mark.parametrize("b_row_major", [False, True])
def test_torch_base_case(
    mode: str, strided: bool, a_row_major: bool, b_row_major: bool, dtype: torch.dtype, device: torch.device
) -> None:
    a, b, all_offs = conformance(mode, strided, a_row_major, b_row_major, dtype, device)
    for offs in all_offs[: 1 if strided else 2]:
        check(a, b, offs)


@pytest.mark.parametrize("offs_dtype", [torch.int32, torch.int64])
def test_torch_odd_sizes(offs_dtype: torch.dtype, device: torch.device) -> None:
    for mode, m, n, k, all_ends in ODD_SIZES:
        for ends, dtype in zip(all_ends, (BF16, FP32)):
            check(*operands(mode, ends, m, n, k, dtype, device, offs_dtype=offs_dtype))


# DeepSpeed's table.


@dtypes
@pytest.mark.parametrize(("counts", "k", "n"), COUNTS)
def test_deepspeed_counts(counts: list[int], k: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
    """Forward with both weight layouts, and both gradients."""
    ends = list(itertools.accumulate(counts))
    x, w, offs = operands("ragged_m", ends, 0, n, k, dtype, device)
    dy = operands("ragged_m", ends, 0, 1, n, dtype, device, seed=5)[0]
    check(x, w, offs)
    check(x, w.mT.contiguous().mT, offs)
    check(dy, w.mT, offs)
    check(dy.t(), x, offs, out_dtype=FP32, accumulate=True)


def test_many_groups(device: torch.device) -> None:
    """The slots of 775 groups with 0 to 2 rows, and of 4096 with most of them empty."""
    counts = [(7 * i) % 3 for i in range(775)] if device.type == "cuda" else [(7 * i) % 3 for i in range(75)]
    check(*operands("ragged_m", list(itertools.accumulate(counts)), 0, 16, 16, FP16, device))
    ends = [0] * 2000 + [3] * 1000 + [5] * 1096 if device.type == "cuda" else [0] * 40 + [3] * 30 + [5] * 30
    check(*operands("ragged_m", ends, 0, 16, 16, FP32, device))
    check(*operands("ragged_k", ends, 3, 5, 0, FP32, device))


# Edges.


@modes
@pytest.mark.parametrize("name", cases.EDGE_SPLITS)
def test_edge_groups(mode: str, name: str, device: torch.device) -> None:
    ends = list(itertools.accumulate(cases.EDGE_SPLITS[name]))
    check(*operands(mode, ends, 24, 20, 24, BF16, device))
    check(*operands(mode, ends, 24, 20, 24, FP32, device), config=Config(32, 16, 16, 4, 2))


@pytest.mark.parametrize("mode", ["ragged_m", "ragged_n", "ragged_k"])
def test_group_sizes_around_those_of_tiles(mode: str, device: torch.device) -> None:
    ends = list(itertools.accumulate(cases.EDGE_ROWS))
    config = Config(64, 32, 32, 4, 2)
    a, b, offs = operands(mode, ends, 24, 24, 40, FP16, device)
    check(a, b, offs, config=config)


@pytest.mark.parametrize("k", cases.EDGE_K)
def test_edge_k(k: int, device: torch.device) -> None:
    for mode in ("ragged_m", "batched"):
        check(*operands(mode, [7, 7, 30], 7, 24, k, FP16, device))
        check(*operands(mode, [7, 7, 30], 7, 24, k, FP16, device), bias=torch.ones(3, 24, device=device))
    check(*operands("ragged_k", [k, k], 17, 24, k, FP16, device))


@pytest.mark.parametrize("n", cases.EDGE_N)
def test_edge_n(n: int, device: torch.device) -> None:
    check(*operands("ragged_m", [7, 7, 30], 0, n, 24, BF16, device), bias=torch.ones(3, n, device=device))


def test_no_groups_and_no_rows(device: torch.device) -> None:
    offs = torch.zeros(0, dtype=torch.int32, device=device)
    x, w = torch.randn(20, 16, device=device), torch.randn(0, 16, 8, device=device)
    assert check(x, w, offs).count_nonzero() == 0
    assert check(x.t(), x, offs).shape == (0, 16, 16)
    check(w, w.mT, None)
    for mode in MODES[:3]:
        check(*operands(mode, [0, 0], 8, 8, 8, BF16, device))
        check(*operands(mode, [0, 0], 8, 8, 8, BF16, device), accumulate=True)


@pytest.mark.parametrize("mode", ["ragged_m", "ragged_n"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_after_the_last_group(mode: str, accumulate: bool, device: torch.device) -> None:
    """Zeros, also with a bias; when accumulating they stay as they are, to the last bit."""
    for ends in ([5, 5, 40], [0, 0, 0], [64, 70, 70]):
        a, b, offs = operands(mode, ends, 24, 24, 16, FP32, device, total=100)
        bias = torch.randn(3, 24 if mode == "ragged_m" else 100, device=device)
        result = check(a, b, offs, bias=bias, accumulate=accumulate, config=SMALL)
        if not accumulate:
            assert (result[ends[-1] :] if mode == "ragged_m" else result[:, ends[-1] :]).count_nonzero() == 0


def test_nothing_to_add_leaves_out_alone(device: torch.device) -> None:
    """-0.0 and NaN included, where a group has no tokens, or K is 0."""
    for mode, k in (("ragged_k", 0), ("ragged_m", 0), ("batched", 0)):
        a, b, offs = operands(mode, [0, 0], 8, 8, k, BF16, device, total=0 if mode == "ragged_k" else 8)
        out = torch.tensor([-0.0, NAN], device=device).repeat(math.prod(out_shape(a, b, offs)) // 2)
        out = out.view(out_shape(a, b, offs))
        before = out.clone()
        launch.run(a, b, offs, out, None, True)
        assert same_bits([out], [before])


@modes
@dtypes
def test_accumulate_fp32_out_and_bias(mode: str, dtype: torch.dtype, device: torch.device) -> None:
    a, b, offs = operands(mode, [9, 9, 20, 24], 20, 24, 24, dtype, device)
    n = out_shape(a, b, offs)[-1]
    biases = (None, torch.randn(4, n, device=device).to(dtype), torch.randn(n, 4, device=device).t())
    for i, (accumulate, out_dtype) in enumerate(itertools.product((False, True), (dtype, FP32))):
        check(a, b, offs, out_dtype=out_dtype, bias=biases[i % 3], accumulate=accumulate, config=SMALL)
        check(a, b, offs, out_dtype=out_dtype, bias=biases[(i + 1) % 3], accumulate=accumulate)


def test_rounds_once(device: torch.device) -> None:
    """out + product + bias: two quarters of the last bit and a little are more than half of it, in float32."""
    for mode in ("ragged_m", "ragged_k"):
        a = torch.full((16, 1) if mode == "ragged_m" else (1, 1), 2.0**-9, dtype=BF16, device=device)
        b = torch.ones((1, 1, 16) if mode == "ragged_m" else (1, 16), dtype=BF16, device=device)
        offs = torch.tensor([len(a)], device=device)
        out = torch.full(out_shape(a, b, offs), 1 + 2.0**-7, dtype=BF16, device=device)
        bias = torch.full((1, 16), 2.0**-9 + 2.0**-12, dtype=FP32, device=device)
        launch.run(a, b, offs, out, bias, accumulate=True)
        assert (out == 1 + 2.0**-6).all()


@pytest.mark.parametrize("mode", ["ragged_m", "ragged_k", "batched"])
def test_nan_and_inf_stay_in_their_group(mode: str, device: torch.device) -> None:
    a, b, offs = operands(mode, [10, 30, 50], 20, 24, 24, FP32, device)
    if mode == "ragged_k":
        a[3, 12], a[5, 20], b[29, 2] = NAN, math.inf, NAN
    elif mode == "ragged_m":
        a[12, 3], a[13, 5], b[1, 2, 2] = NAN, math.inf, NAN
    else:
        a[1, 2, 3], b[1, 4, 5] = NAN, math.inf
    result = check(a, b, offs, config=SMALL)
    clean = result[[*range(10), *range(30, 50)]] if mode == "ragged_m" else result[[0, 2]]
    assert clean.isfinite().all()
    assert not result.isfinite().all()


# Strides.


def in_padding_of_nan(x: Tensor) -> Tensor:
    buffer = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), NAN)
    buffer[..., 1:-2, 2:-3] = x
    return buffer[..., 1:-2, 2:-3]


def misaligned(x: Tensor) -> Tensor:
    flat = x.new_full((x.numel() + 2,), NAN)
    flat[1:-1] = x.flatten()
    return flat[1:-1].view(x.shape)


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded": in_padding_of_nan,
    "misaligned": misaligned,
    "column_major": lambda x: x.mT.contiguous().mT,
    "column_major_misaligned": lambda x: misaligned(x.mT.contiguous()).mT,
    "every_second_column": lambda x: torch.stack([x, torch.full_like(x, NAN)], -1).flatten(-2)[..., ::2],
    "one_row": lambda x: x[..., :1, :].expand(x.shape),
    "one_value": lambda x: x[..., :1, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided(x.shape, (*[4] * (x.dim() - 2), 2, 1)),
    "one_batch": lambda x: x[:1].expand(x.shape),
}


@modes
@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_operands(mode: str, variant: str, device: torch.device) -> None:
    a, b, offs = operands(mode, [8, 8, 33], 24, 40, 32, FP16, device)
    change = VARIANTS[variant]
    check(change(a), b, offs)
    check(a, change(b), offs)
    check(change(a), change(b), offs, config=SMALL)


@modes
@pytest.mark.parametrize(
    "variant", ["padded", "misaligned", "column_major", "column_major_misaligned", "every_second_column"]
)
def test_strided_out(mode: str, variant: str, device: torch.device) -> None:
    for dtype, accumulate in ((BF16, False), (FP32, True)):
        a, b, offs = operands(mode, [8, 8, 33], 24, 40, 32, dtype, device)
        out = VARIANTS[variant](torch.zeros(out_shape(a, b, offs), dtype=dtype, device=device))
        check(a, b, offs, out=out, accumulate=accumulate)


def test_strided_offs(device: torch.device) -> None:
    a, b, _ = operands("ragged_m", [8, 8, 33], 0, 40, 32, FP32, device)
    check(a, b, torch.tensor([8, 99, 8, 99, 33, 99], device=device)[::2])


def test_strided_bias(device: torch.device) -> None:
    a, b, offs = operands("ragged_m", [8, 8, 33], 0, 40, 32, FP32, device)
    check(a, b, offs, bias=torch.randn(40, device=device).expand(3, 40))
    check(a, b, offs, bias=torch.randn(3, 81, device=device)[:, 1::2])


def test_leading_dimension_1025(device: torch.device) -> None:
    """x[8, 1025], w[4, 512, 1025] transposed: strides that a peer accepted and computed wrongly."""
    n = 512 if device.type == "cuda" else 40
    x = torch.randn(8, 1025).to(device, BF16)
    w = torch.randn(4, n, 1025).to(device, BF16)
    offs = torch.tensor([2, 2, 7, 8], device=device)
    check(x, w.mT, offs)
    check(x[:, :1024], w[:, :, :1024].mT, offs)


def test_leading_stride_2_to_the_31(device: torch.device) -> None:
    """Batches 2^31 elements apart, of which only the pages that are used exist on the CPU."""
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 2**34:
        pytest.skip("needs 16 GiB of free GPU memory")
    buffer = torch.empty(2**31 + 64, dtype=FP16, device=device)
    offs = torch.tensor([1, 3], device=device)
    b = buffer.as_strided((2, 8, 8), (2**31, 8, 1))
    b.copy_(torch.randn(2, 8, 8))
    check(torch.randn(3, 8).to(device, FP16), b, offs)
    a = buffer.as_strided((2, 1, 8), (2**31, 8, 1))
    check(a, b.clone(), None)
    rows = buffer.as_strided((2, 8), (2**31, 1))
    check(rows, b.clone(), torch.tensor([1, 2], device=device))
    rows = buffer.as_strided((5, 8), (2**29, 1))
    check(rows.copy_(torch.randn(5, 8)), b.clone(), torch.tensor([0, 5], device=device))


# Offsets that lie.

HOSTILE = {
    "negative": [-5, 3, 20],
    "past_the_end": [5, 10**6, 2 * 10**9],
    "all_negative": [-(10**9)] * 3,
    "decreasing": [30, 10, 20],
    "wild": [2**31 - 1, -(2**31), 17],
}


@pytest.mark.parametrize("mode", MODES[:3])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_offs(mode: str, name: str, device: torch.device) -> None:
    """Values outside count as the nearest end of the buffer. Decreasing ones give anything, but inside of out."""
    ordered = HOSTILE[name] == sorted(HOSTILE[name])
    for config, offs_dtype in ((None, torch.int32), (SMALL, torch.int64)):
        a, b, offs = operands(mode, HOSTILE[name], 24, 24, 16, FP16, device, total=40, offs_dtype=offs_dtype)
        if ordered:
            check(a, b, offs, config=config)
        else:
            buffer = torch.full((math.prod(out_shape(a, b, offs)) + 4096,), CANARY, dtype=FP16, device=device)
            out = buffer[2048:-2048].view(out_shape(a, b, offs))
            launch.run(a, b, offs, out, config=config)
            out.fill_(CANARY)
            assert (buffer == CANARY).all()


def test_no_access_outside_of_the_tensors(python: Callable[..., Any]) -> None:
    """Every tensor ends, or begins, at a page that may not be touched. The interpreter dereferences for real."""
    python(PROTECTED_PAGES, TRITON_INTERPRET="1")


PROTECTED_PAGES = """
import ctypes, mmap
import torch
from gmm.triton import launch
from gmm.triton.configs import Config

libc = ctypes.CDLL(None, use_errno=True)
PAGE, kept = mmap.PAGESIZE, []

def fenced(shape, dtype, at_end):
    size = torch.Size(shape).numel() * dtype.itemsize
    pages = -(-size // PAGE) or 1
    region = mmap.mmap(-1, (pages + 2) * PAGE)
    kept.append(region)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, 0) == 0
    start = PAGE + (pages * PAGE - size if at_end else 0)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(region, dtype=dtype, offset=start, count=size // dtype.itemsize).view(shape)

small = Config(16, 16, 16, 4, 2)
sizes = [
    (3, 7, 13, 19, [8, 16, 16, 19]),
    (17, 16, 32, 40, [3, 9, 20, 37]),
    (17, 33, 5, 40, [-7, 90, 3, 60]),
    (1, 1, 1, 3, [9, -9, 2, 2]),
]
for at_end, dtype, config in ((True, torch.float16, small), (True, torch.float32, None), (False, torch.float32, None)):
    for m, n, k, total, ends in sizes:
        for mode in ("m", "n", "k", ""):
            a = fenced({"m": (total, k), "n": (4, m, k), "k": (m, total), "": (4, m, k)}[mode], dtype, at_end)
            b = fenced({"m": (4, k, n), "n": (k, total), "k": (total, n), "": (4, k, n)}[mode], dtype, at_end)
            out = fenced({"m": (total, n), "n": (m, total), "k": (4, m, n), "": (4, m, n)}[mode], dtype, at_end)
            offs = fenced((4,), torch.int32, at_end)
            offs.copy_(torch.tensor(ends))
            bias = fenced((4, out.shape[-1]), dtype, at_end)
            for x in (a, b, bias):
                x.normal_()
            launch.run(a, b, offs if mode else None, out, bias, True, False, config)
"""


# The choice of tiles.

DEVICES = {"RTX 3090": 101376, "A100": 166912, "H100": 232448, "MI300": 65536, "tiny": 16384}


@pytest.mark.parametrize("name", DEVICES)
def test_tiles_fit_into_shared_memory(name: str) -> None:
    limit = DEVICES[name]
    for dtype, rows, n in itertools.product(
        ("bfloat16", "float16", "float32", "tf32"), (1, 8, 64, 100, 4096), (1, 24, 4096)
    ):
        config = configs.choose(dtype, rows, n, limit)
        assert configs.shared_memory(config, dtype) <= limit
        assert config.block_n <= max(16, 2 * n)
        if name != "tiny":
            assert config in configs.alternatives(dtype, n, limit)


def test_larger_devices_get_larger_tiles() -> None:
    tiles = [configs.choose("bfloat16", 4096, 4096, DEVICES[name]) for name in ("RTX 3090", "A100", "H100")]
    areas = [x.block_m * x.block_n * x.stages for x in tiles]
    assert areas == sorted(set(areas))


def test_signature_says_all_that_describe_depends_on() -> None:
    """Calls of one key differ in the token count alone, and get the same kind."""
    seen: dict[Any, call.Call] = {}
    makers = {
        "rows": lambda t, k, n: (torch.empty(t, k), torch.empty(4, k, n), torch.empty(t, n)),
        "rows_t": lambda t, k, n: (torch.empty(t, k), torch.empty(4, n, k).mT, torch.empty(t, n)),
        "columns": lambda t, k, n: (torch.empty(4, n, k), torch.empty(t, k).t(), torch.empty(n, t)),
        "depth": lambda t, k, n: (torch.empty(t, k).t(), torch.empty(t, n), torch.empty(4, k, n)),
        "depth_t": lambda t, k, n: (torch.empty(k, t), torch.empty(t, n), torch.empty(4, k, n)),
        "batch": lambda t, k, n: (torch.empty(4, t, k), torch.empty(4, k, n), torch.empty(4, t, n)),
        "odd": lambda t, k, n: (torch.empty(t, k + 1)[:, 1:], torch.empty(4, k, n), torch.empty(t, n)),
        "halves": lambda t, k, n: (torch.empty(t, k).half(), torch.empty(4, k, n).half(), torch.empty(t, n)),
        "half_a": lambda t, k, n: (torch.empty(t * k + 1)[1:].view(t, k), torch.empty(4, k, n), torch.empty(t, n)),
        "half_b": lambda t, k, n: (torch.empty(t, k), torch.empty(4 * k * n + 1)[1:].view(4, k, n), torch.empty(t, n)),
    }
    hits = 0
    for maker, t, k, n in itertools.product(makers.values(), (1, 2, 16, 17, 63, 64, 65, 4096), (1, 8, 24), (1, 8, 24)):
        a, b, out = maker(t, k, n)
        for bias, accumulate, tf32 in ((None, False, False), (torch.empty(4, out.shape[-1]), True, True)):
            offs = None if a.dim() == b.dim() == 3 else torch.empty(4, dtype=torch.int32)
            key, tokens = call.signature(a, b, offs, out, bias, accumulate, tf32)
            described = call.describe(a, b, offs, out, bias, accumulate, tf32)
            i = call.TOKENS[described.kind.mode]
            assert described.integers[i] == tokens
            blanked = described._replace(integers=(*described.integers[:i], 0, *described.integers[i + 1 :]))
            hits += key in seen
            assert seen.setdefault(key, blanked) == blanked
    assert hits > 200, "the keys hold the token count"


def test_access() -> None:
    """What may be read 16 bytes at a time."""
    x = torch.empty(64, 64, dtype=BF16)

    def access(x: Tensor, ragged_axis: int = -1) -> tuple[int, int]:
        (rows, columns), (row_stride, column_stride) = x.shape, x.stride()
        return tuple(call._access(x, (rows, columns), (row_stride, column_stride), 0, ragged_axis))

    assert access(x) == (1, 8)
    assert access(x.t()) == (0, 8)
    assert access(x.float()) == (1, 4)
    assert access(x[1:]) == (1, 8)
    assert access(x[:, 8:]) == (1, 8)
    assert access(x[:, 1:]) == (1, 1)  # address and width
    assert access(x[:, :63]) == (1, 1)  # a vector across the edge
    assert access(x.flatten()[: 63 * 63].view(63, 63)) == (1, 1)  # rows start anywhere
    assert access(x[:, ::2]) == (-1, 1)
    assert access(x, ragged_axis=1) == (1, 1)  # a group may end anywhere
    assert access(x, ragged_axis=0) == (1, 8)
    assert access(x[:1, :1].expand(64, 64)) == (-1, 1)
    assert access(x[:1].expand(64, 64)) == (1, 8)


# Launching, compiling and tuning, without a GPU: kernels are compiled for an H100 and their launches recorded.


class FakeDriver:
    """Stands for Triton's driver of an H100."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.launches: list[tuple[Any, ...]] = []
        self.arch = 90
        driver = self

        class Launcher:
            def __init__(self, *_: Any) -> None:
                pass

            def __call__(self, *arguments: Any) -> None:
                driver.launches.append(arguments)

        self.launcher_cls = Launcher
        self.utils = self
        self.get_current_target = lambda: GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": DEVICES["H100"]}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return None, 1, 0, 0, 1024  # no module: nothing to unload when this driver is gone


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """CPU tensors are then taken for those of an H100. No plan of it is left."""
    import triton

    driver, kernel = FakeDriver(), launch._kernel.__wrapped__(False)
    monkeypatch.setattr(launch, "_kernel", lambda interpreted: kernel)
    monkeypatch.setattr(launch, "_is_interpreted", lambda device: False)
    monkeypatch.setattr(launch, "shared_memory", lambda device: DEVICES["H100"])
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_no_handles", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return driver


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every kernel that Triton compiles."""
    from triton import knobs

    compiled: list[str] = []

    def hook(*, repr: str, **_: Any) -> None:
        compiled.append(repr)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    return compiled


def forward(tokens: int, groups: int = 4, k: int = 64, n: int = 48, *, shift: int = 0) -> tuple[Tensor, ...]:
    """a, b, offs and out of an MoE layer's forward; `shift` elements off the 16-byte boundary."""
    x = torch.empty(tokens * k + shift, dtype=BF16)[shift:].view(tokens, k)
    w = torch.empty(groups, n, k, dtype=BF16).mT
    return x, w, torch.full((groups,), tokens, dtype=torch.int32), torch.empty(tokens, n, dtype=BF16)


def test_token_counts_compile_nothing(fake_gpu: FakeDriver, compilations: list[str]) -> None:
    """Forward, dgrad, wgrad, also where strides hold the token count; new buckets of the average take a few tiles."""
    for tokens in (129, 130, 144, 160, 199, 255, 256):
        x, w, offs, out = forward(tokens)
        dw = torch.empty(4, 48, 64)
        launch.run(x, w, offs, out)
        launch.run(out, w.mT, offs, x)
        launch.run(out.t(), x, offs, dw, None, True)
        launch.run(out.t().contiguous(), x, offs, dw, None, True)
        launch.run(w.mT, x.t(), offs, torch.empty(48, tokens, dtype=BF16))
    assert len(compilations) == 5
    assert len(fake_gpu.launches) == 5 * 7
    before = len(compilations)
    for tokens in (4, 64, 1000, 5000, 70000, 10**6):
        launch.run(*forward(tokens))
    assert len(compilations) - before <= 4


def test_handles_are_launched_with_the_arguments_of_the_call(fake_gpu: FakeDriver) -> None:
    """Directly: the second launch gets the same integers as Triton's own path, and addresses for tensors."""
    x, w, offs, out = forward(200)
    for _ in range(3):
        launch.run(x, w, offs, out)
    assert gmm.triton.launch_path() == "handle"
    through_jit, direct, again = (arguments[-36:] for arguments in fake_gpu.launches)
    pointers = (w.data_ptr() and x.data_ptr(), w.data_ptr(), out.data_ptr(), None, offs.data_ptr())
    assert direct[:5] == pointers
    assert direct == again
    assert direct[5:] == through_jit[5:]
    config = next(iter(launch._plans.values())).config
    assert fake_gpu.launches[1][:3] == ((200 // config.block_m + 5) * -(-48 // config.block_n), 1, 1)


def test_profilers_see_launches_of_handles(fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's launch hooks, which direct launches pass by while there are none, get what its own path gives them."""
    from triton import knobs

    launch.run(*forward(200))
    launch.run(*forward(200))
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = type(knobs.runtime.launch_enter_hook)()
        chain.add(print)
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, hook, chain)
            launch.run(*forward(200))
        metadata, enter, leave = fake_gpu.launches[-1][6:9]
        assert (enter if hook == "launch_enter_hook" else leave) is chain
        assert metadata.get()["name"] == "grouped_gemm"
    assert fake_gpu.launches[1][6:9] == (None, None, None)


def test_falls_back_to_the_jit_path(fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this Triton's compiled kernels take other arguments, and says so."""
    launch.run(*forward(200))

    class Strange:
        function = packed_metadata = None

        def run(self, *_: Any) -> None:
            raise TypeError("takes exactly 3 arguments")

    for plan in launch._plans.values():
        plan.compiled = Strange()
    launch.run(*forward(200))
    launch.run(*forward(210))
    assert len(fake_gpu.launches) == 3
    assert gmm.triton.launch_path() == "jit: TypeError: takes exactly 3 arguments"


def test_misaligned_operands_get_a_kernel_of_their_own(fake_gpu: FakeDriver, compilations: list[str]) -> None:
    """A kernel with 16-byte accesses is never launched on addresses that are not multiples of 16 bytes."""
    for shift in (0, 1, 8, 4, 0, 1):
        launch.run(*forward(200, shift=shift))
    assert len(compilations) == 2
    vectors = [plan.kind.a.vector for plan in launch._plans.values()]
    assert sorted(vectors) == [1, 1, 8], "a plan a class of address"


def test_vector_instructions(fake_gpu: FakeDriver) -> None:
    """Aligned operands are copied 16 bytes at a time into shared memory for wgmma, and stored 16 bytes at a time."""
    launch.run(*forward(4096, k=256, n=256))
    (plan,) = launch._plans.values()
    ptx = plan.compiled.asm["ptx"]
    copies = [line for line in ptx.splitlines() if "cp.async.cg" in line]
    assert copies
    assert all("0x10" in line for line in copies)
    assert "wgmma.mma_async" in ptx
    assert "st.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx


@pytest.mark.parametrize("name", ["RTX 3090", "A100", "H100"])
def test_compiled_tiles_need_no_more_than_the_table_says(name: str, fake_gpu: FakeDriver) -> None:
    """Shared memory of the largest tiles, each compiled for the architecture that takes it."""
    fake_gpu.arch = {"RTX 3090": 86, "A100": 80, "H100": 90}[name]
    for precision, dtype in (("bfloat16", BF16), ("tf32", FP32)):
        x, w = torch.empty(512, 64, dtype=dtype), torch.empty(1, 64, 512, dtype=dtype)
        offs, out = torch.tensor([512]), torch.empty(512, 512)
        launch.run(x, w, offs, out, None, True, True, configs.choose(precision, 512, 512, DEVICES[name]))
    for plan in launch._plans.values():
        needed, said = plan.compiled.metadata.shared, configs.shared_memory(plan.config, plan.kind.precision)
        assert needed <= said <= DEVICES[name], plan


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> call.Kind:
    """A kind of call, as if on a GPU."""
    monkeypatch.setattr(cache, "_device_name", lambda device: "NVIDIA H100")
    x, w, offs, out = forward(200)
    return call.describe(x, w, offs, out, None, False, False).kind._replace(device=torch.device("cuda", 0))


def test_cache(cache_folder: Path, kind: call.Kind) -> None:
    limit = DEVICES["H100"]
    assert cache.lookup(kind, limit) is None
    tile = configs.alternatives("bfloat16", kind.n, limit)[-1]
    cache.store(kind, tile)
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert cache.lookup(kind, limit) == tile
    assert cache.lookup(kind._replace(n=1024), limit) is None
    assert cache.lookup(kind._replace(rows=1024), limit) is None
    assert cache.lookup(kind, 16384) is None, "a tile that does not fit"
    (file,) = cache_folder.iterdir()
    assert json.loads(file.read_text())["tile"] == list(tile)
    for text in (
        "",
        "{",
        "[]",
        '{"tile": 3}',
        '{"tile": [128, 256, 64, 8, 3, 9]}',
        '{"tile": ["__import__(0)"]}',
        "\x00",
    ):
        file.write_text(text)
        assert cache.lookup(kind, limit) is None


def test_cache_folder_of_others_is_refused(cache_folder: Path, kind: call.Kind) -> None:
    limit = DEVICES["H100"]
    tile = configs.alternatives("bfloat16", kind.n, limit)[0]
    cache.store(kind, tile)
    os.chmod(cache_folder, 0o777)
    assert cache.lookup(kind, limit) is None
    with pytest.raises(RuntimeError, match="GMM_CACHE_DIR: expected a folder that only its user can write to"):
        cache.store(kind, tile)


def test_cached_tile_is_taken(cache_folder: Path, kind: call.Kind, fake_gpu: FakeDriver) -> None:
    tile = configs.alternatives("bfloat16", kind.n, DEVICES["H100"])[-1]
    cache.store(kind, tile)
    launch.run(*forward(200))
    assert next(iter(launch._plans.values())).config == tile


def test_autotune_refuses_cpu_tensors() -> None:
    x, w, offs, _ = forward(20)
    with pytest.raises(RuntimeError, match="a: expected a tensor on a GPU"):
        gmm.triton.autotune(x, w, offs)


def test_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in str(gmm.triton.supports(torch.device("cpu")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gmm.triton.supports(torch.device("cpu")) is None
    assert "no backend for meta" in str(gmm.triton.supports(torch.device("meta")))
    launch._supports.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "cuda:0 is sm75" in str(gmm.triton.supports(torch.device("cuda", 0)))
    launch._supports.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert gmm.triton.supports(torch.device("cuda", 0)) is None
    launch._supports.cache_clear()


def test_public_names(device: torch.device) -> None:
    """The launch below the checks of gmm.grouped_mm, and tuning, which is imported when it is asked for."""
    a, b, offs = operands("ragged_m", [9, 9, 20], 0, 24, 16, BF16, device)
    outs = [torch.full((a.shape[0], 24), NAN, dtype=BF16, device=device) for _ in range(2)]
    gmm.triton.grouped_mm(a, b, offs, outs[0])
    launch.run(a, b, offs, outs[1])
    assert torch.equal(*outs)
    gmm.triton.grouped_mm(a[:0], b, offs, outs[0][:0])
    assert gmm.triton.launch_path() == "handle" or gmm.triton.launch_path().startswith("jit: ")
    assert callable(gmm.triton.autotune)
    with pytest.raises(AttributeError, match="module 'gmm.triton' has no attribute 'autotuned'"):
        _ = gmm.triton.autotuned


def test_plans_do_not_pile_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(launch, "_MOST_PLANS", 3)
    for n in range(1, 6):
        check(*operands("ragged_m", [2, 4], 0, n, 8, FP32, device))
        assert 1 <= len(launch._plans) <= 3


def test_works_without_triton(python: Callable[..., Any]) -> None:
    """It can be imported, and says so."""
    python(
        "import sys; sys.modules['triton'] = None; import torch, gmm.triton;"
        "assert gmm.triton.supports(torch.device('cpu')) == 'triton is not installed'",
        TRITON_INTERPRET="1",
    )


# On a GPU.


def model_call(shape: cases.ModelShape, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w in its native layout, offs and an out full of NaN."""
    splits = torch.tensor(shape.splits())
    generator = seeded(torch.device("cuda"))
    x = torch.randn(int(splits.sum()), shape.k, device="cuda", generator=generator).to(dtype)
    w = torch.randn(shape.groups, shape.n, shape.k, device="cuda", generator=generator).to(dtype)
    out = torch.full((len(x), shape.n), NAN, dtype=dtype, device="cuda")
    return x, w, splits.cumsum(0).to("cuda", torch.int32), out


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("shape", [cases.MODEL_SHAPES[i] for i in (2, 4, 8, 10, 11)], ids=lambda s: s.label)
def test_model_shapes(shape: cases.ModelShape, dtype: torch.dtype) -> None:
    """Forward, dgrad and wgrad of MoE layers, with and without a main_grad."""
    x, w, offs, dy = model_call(shape, dtype)
    check(x, w.mT, offs)
    dy.normal_()
    check(dy, w, offs)
    check(dy.t(), x, offs)
    check(dy.t(), x, offs, out_dtype=FP32, accumulate=True)


@pytest.mark.gpu
@modes
def test_tf32(mode: str) -> None:
    a, b, offs = operands(mode, [100, 100, 300], 72, 136, 200, FP32, torch.device("cuda"))
    loose, exact = check(a, b, offs, tf32=True), check(a, b, offs)
    assert torch.version.hip or not torch.equal(loose, exact)


@pytest.mark.gpu
def test_every_tile() -> None:
    """Each that the device can run, in every mode, with odd sizes."""
    device = torch.device("cuda")
    for mode, dtype in itertools.product(MODES, (BF16, FP32)):
        for precision in ("tf32", "float32") if dtype is FP32 else ("bfloat16",):
            a, b, offs = operands(mode, [100, 100, 300, 431], 72, 136, 200, dtype, device, total=500)
            for config in configs.alternatives(precision, 4096, launch.shared_memory(torch.device("cuda", 0))):
                check(a, b, offs, config=config, tf32=precision == "tf32")
                check(a, b, offs, config=config, tf32=precision == "tf32", out_dtype=FP32, accumulate=True)


@pytest.mark.gpu
def test_handles_are_used_on_this_triton() -> None:
    x, w, offs, out = model_call(cases.MODEL_SHAPES[-2])
    for _ in range(3):
        launch.run(x, w.mT, offs, out)
    assert gmm.triton.launch_path() == "handle"
    assert gmm.triton.supports(x.device) is None


@pytest.mark.gpu
def test_token_counts_compile_nothing_on_a_gpu(compilations: list[str]) -> None:
    x, w, offs, out = model_call(cases.MODEL_SHAPES[2])
    launch.run(x, w.mT, offs, out)
    compilations.clear()
    for cut in range(1, 1000, 37):
        launch.run(x[cut:], w.mT, offs - cut, out[cut:])
    assert not compilations


@pytest.mark.gpu
def test_does_not_synchronise() -> None:
    for mode in MODES:
        a, b, offs = operands(mode, [100, 100, 300], 72, 136, 200, BF16, torch.device("cuda"))
        out = torch.empty(out_shape(a, b, offs), dtype=BF16, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                launch.run(a, b, offs, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_graph_replays_see_new_offs_and_data() -> None:
    a, b, offs = operands("ragged_m", [100, 100, 300], 0, 136, 200, BF16, torch.device("cuda"), total=400)
    assert offs is not None
    out = torch.empty(out_shape(a, b, offs), dtype=BF16, device="cuda")
    launch.run(a, b, offs, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run(a, b, offs, out)
    for ends in ([0, 0, 0], [1, 2, 400], [400, 400, 400], [128, 256, 384]):
        offs.copy_(torch.tensor(ends))
        a.normal_()
        out.fill_(NAN)
        graph.replay()
        replayed = out.clone()
        launch.run(a, b, offs, out)
        assert same_bits([replayed], [out])


@pytest.mark.gpu
def test_equal_bits_in_every_run_and_batch() -> None:
    """The shape on which a peer's k-grouped descriptors raced, and a row among other rows and groups."""
    device = torch.device("cuda")
    ends = list(itertools.accumulate(cases.RACE_KS))
    a, b, offs = operands("ragged_k", ends, cases.RACE_M, cases.RACE_N, 0, BF16, device)
    out = torch.empty(out_shape(a, b, offs), device=device)
    launch.run(a, b, offs, out)
    first = out.clone()
    wrong = torch.zeros((), device=device, dtype=torch.int64)
    for _ in range(1000):
        out.fill_(NAN)
        launch.run(a, b, offs, out)
        wrong += (out != first).sum()
    assert wrong == 0
    x, w, offs = operands("ragged_m", [300, 700], 0, 768, 2048, BF16, device)
    whole = check(x, w, offs, config=configs.choose("bfloat16", 256, 768, 2**18))
    part = check(
        x[290:333], w, torch.tensor([10, 43], device=device), config=configs.choose("bfloat16", 256, 768, 2**18)
    )
    assert same_bits([whole[290:333]], [part])


@pytest.mark.gpu
@pytest.mark.memory(40)
def test_more_than_2_to_the_31_elements() -> None:
    """64 experts of 4096 x 14336: 3.7e9 elements; 64-bit addresses in b and in the wgrad's out."""
    w = torch.randn(64, 4096, 14336, device="cuda", dtype=BF16)
    x = torch.randn(70, 14336, device="cuda", dtype=BF16)
    ends = [0] * 62 + [30, 70]
    offs = torch.tensor(ends, device="cuda")
    out = torch.full((70, 4096), NAN, device="cuda", dtype=BF16)
    launch.run(x, w.mT, offs, out)
    for g, rows in ((62, slice(0, 30)), (63, slice(30, 70))):
        exact = x[rows].double() @ w[g].double().t()
        assert (out[rows] - exact).norm() < 3e-3 * exact.norm()
    w.fill_(NAN)
    launch.run(out.t(), x, offs, w)
    assert w[:62].count_nonzero() == 0
    exact = out[30:].double().t() @ x[30:].double()
    assert (w[63] - exact).norm() < 3e-3 * exact.norm()


@pytest.mark.gpu
def test_tuned_tiles_are_kept(cache_folder: Path) -> None:
    x, w, offs, out = model_call(cases.MODEL_SHAPES[-2])
    tile = gmm.triton.autotune(x, w.mT, offs)
    assert len(list(cache_folder.iterdir())) == 1
    launch.run(x, w.mT, offs, out)
    assert any(plan.config == tile for plan in launch._plans.values())
    check(x, w.mT, offs)
    launch.forget_plans()


def test_direct_calls_of_one_kind_differ_in_tokens_alone(device: torch.device) -> None:
    """Python runs repeated calls itself, after the first was checked; what was checked then must be in the key."""
    launch.forget_plans()
    w = torch.randn(3, 24, 16, device=device)
    for ends in ([8, 8, 20], [1, 5, 30], [0, 2, 25]):
        x, offs = torch.randn(32, 16, device=device), torch.tensor(ends, dtype=torch.int32, device=device)
        with torch.no_grad():
            y = gmm.grouped_mm(x, w, offs, trans_b=True, backend="triton")
            dw = gmm.grouped_mm(y.mT, x, offs, backend="triton")
        assert gmm.last_backend().startswith("triton")
        for g, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            torch.testing.assert_close(y[start:end], x[start:end] @ w[g].mT, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(dw[g], y[start:end].mT @ x[start:end], rtol=1e-4, atol=1e-4)
        assert not y[ends[-1] :].any()
    assert len(launch.direct_plans) == 2, "a plan for each of the two products"
    wrong = (
        (torch.randn(32, 17, device=device), w, offs),
        (x.double(), w, offs),
        (x, w, offs.float()),
        (x, w, offs[:2]),
        (y.mT, torch.randn(31, 16, device=device), offs),
    )
    for a, b, ends_of_groups in wrong:
        with pytest.raises(RuntimeError, match="expected"), torch.no_grad():
            gmm.grouped_mm(a, b, ends_of_groups, trans_b=b is w, backend="triton")


def test_direct_calls_by_every_way_to_ask_for_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend=, use_backend() and GMM_BACKEND; and the op itself."""
    a, b = torch.randn(6, 16, device=device), torch.randn(2, 16, 8, device=device)
    offs = torch.tensor([3, 5], dtype=torch.int32, device=device)

    def by_environment() -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(gmm.backend, "_environment", "triton")
            return gmm.grouped_mm(a, b, offs)

    def by_setter() -> Tensor:
        with gmm.use_backend("triton"):
            return gmm.grouped_mm(a, b, offs)

    def by_argument() -> Tensor:
        return gmm.grouped_mm(a, b, offs, backend="triton")

    def by_the_op() -> Tensor:
        return torch.ops.gmm.grouped_mm(a, b, offs, backend="triton")

    for way in (by_environment, by_setter, by_argument, by_the_op):
        launch.forget_plans()
        for _ in range(2):
            gmm.grouped_mm(a, b, offs, backend="reference" if device.type == "cpu" else "cublas")
            y = way()
            assert gmm.last_backend().startswith("triton: grouped_gemm_")
            torch.testing.assert_close(y[:3], a[:3] @ b[0], rtol=1e-3, atol=1e-3)
            assert not y[5:].any()
        assert len(launch.direct_plans) == 1, f"{way.__name__} went through the dispatcher"


def test_direct_calls_leave_to_the_dispatcher_what_is_its(device: torch.device) -> None:
    """Negated views, autocast, torch.func, zero tensors, freed memory: after a plain call of the same sizes."""
    a, b = torch.randn(6, 16, device=device), torch.randn(2, 16, 8, device=device)
    offs = torch.tensor([3, 5], dtype=torch.int32, device=device)

    def call(*tensors: Tensor, backend: str = "triton") -> Tensor:
        return gmm.grouped_mm(*tensors, backend=backend)

    def close(x: Tensor, y: Tensor) -> None:
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)

    with torch.no_grad():
        want = call(a, b, offs)
        close(call(torch._neg_view(a), b, offs), -want)
        close(call(a, torch._neg_view(b), offs), -want)
        close(torch.vmap(lambda x: call(x, b, offs))(a.expand(3, 6, 16)), want.expand(3, 6, 8))
        close(call(torch._efficientzerotensor((6, 16), device=device), b, offs), torch.zeros_like(want))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert call(a, b, offs).dtype is torch.bfloat16
            assert call(a, b.bfloat16(), offs).dtype is torch.bfloat16
    leaf, dy = b.clone().requires_grad_(), torch.randn(6, 8, device=device)
    close(
        torch.autograd.grad(call(a, leaf, offs), leaf, torch._neg_view(dy))[0],
        -torch.autograd.grad(call(a, leaf, offs), leaf, dy)[0],
    )
    torch.autograd.grad(call(a, leaf, offs), leaf, dy.expand(3, 6, 8), is_grads_batched=True)
    for i, name in enumerate(("a", "b", "offs")):
        tensors = [a.clone(), b.clone(), offs.clone()]
        tensors[i].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"{name}: expected memory"), torch.no_grad():
            call(*tensors)
