"""What the machine may do to a call: one clear line, nothing written, and the next call works."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_build import core_name

import gmm

PACKAGE = Path(gmm.__file__).parent
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler named cc")


def compile_library(target: Path, code: str, *options: str) -> None:
    target.parent.mkdir(exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(target), *options]
    subprocess.run(command, input=code, text=True, check=True)


# Parts that are missing


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package, for tests to damage."""
    ignored = shutil.ignore_patterns("__pycache__", "_core*")
    shutil.copytree(PACKAGE, tmp_path / "gmm", ignore=ignored)
    shutil.copy(PACKAGE / core_name(), tmp_path / "gmm")
    return tmp_path / "gmm"


@pytest.fixture
def import_error(package: Path, python: Callable[..., Any]) -> Callable[[], str]:
    """What the damaged package's import says: the text of an ImportError, of one line."""

    def run() -> str:
        code = "try:\n    import gmm\nexcept ImportError as error:\n    print(error)\n"
        lines = python(code, PYTHONPATH=str(package.parent)).stdout.splitlines()
        assert len(lines) == 1, lines
        return lines[0]

    return run


@pytest.mark.parametrize("part", ("libgmm.so", "_C.so", core_name()))
def test_missing_part(package: Path, import_error: Callable[[], str], part: str) -> None:
    (package / part).unlink()
    text = import_error()
    assert text.startswith("gmm's compiled parts are missing") and "pip install --no-build-isolation ." in text
    assert part.split(".")[0] in text


@needs_cc
def test_built_for_another_cuda(package: Path, import_error: Callable[[], str]) -> None:
    """A library that wants a cuBLAS that torch has not brought."""
    cublas = package / "libcublas.so.99"
    compile_library(cublas, "int cublas;", "-Wl,-soname,libcublas.so.99")
    compile_library(package / core_name(), "", "-Wl,--no-as-needed", f"-L{package}", "-l:libcublas.so.99")
    cublas.unlink()
    text = import_error()
    assert text.startswith("gmm was built for another CUDA than torch") and "libcublas.so.99" in text
    assert "pip install --no-build-isolation --force-reinstall" in text


def test_ops_that_do_not_load(package: Path, import_error: Callable[[], str]) -> None:
    (package / "_C.so").write_bytes(b"")
    assert import_error().startswith("gmm needs torch >= 2.10, this is ")


# No device, no driver

ASK_FOR_A_PLAN = """
import c_api
args = c_api.Args(c_api.ctypes.sizeof(c_api.Args), 1)
one = (c_api.Matrix * 1)(c_api.Matrix(4096, 8, 8, 8, 0))
args.a = args.b = args.d = one
try:
    assert c_api.plan(args) is None
    print(c_api.library.gmm_last_error().decode())
except RuntimeError as error:
    print(error)
"""


def test_no_device(python: Callable[..., Any]) -> None:
    (line,) = python(ASK_FOR_A_PLAN, CUDA_VISIBLE_DEVICES="").stdout.splitlines()
    assert "no CUDA" in line or "driver version is insufficient" in line, line  # no device, or no driver at all


@needs_cc
@pytest.mark.skipif(gmm.build_info()["cuda"] == "none", reason="needs a build with CUDA")
def test_driver_that_is_too_old(python: Callable[..., Any], tmp_path: Path) -> None:
    """A libcuda that is older than the runtime in libgmm.so."""
    driver = "int cuInit(unsigned flags) { return 0; } int cuDriverGetVersion(int *v) { *v = 11000; return 0; }"
    compile_library(tmp_path / "libcuda.so.1", driver)
    folders = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("LD_LIBRARY_PATH"))))
    (line,) = python(ASK_FOR_A_PLAN, LD_LIBRARY_PATH=folders).stdout.splitlines()
    assert "driver" in line, line


# Calls that fail half-way

OUT_OF_MEMORY = """
import torch, gmm
x, w = torch.randn(64, 128, device="cuda"), torch.randn(128, 256, device="cuda")
d = torch.full((64, 256), float("nan"), device="cuda")
tall, wide = torch.randn(4096, 128, device="cuda"), torch.randn(128, 4096, device="cuda")
torch.cuda.synchronize()
torch.cuda.empty_cache()
fraction = (torch.cuda.memory_reserved() + 2**20) / torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(fraction)
try:
    gmm.multi_tensor_gemm([x], [w], [d], backend="cublas")  # whose workspace is of 32 MiB
except RuntimeError as error:
    print(str(error).splitlines()[0])
try:
    gmm.multi_tensor_gemm([tall], [wide], backend="cublas")  # whose result is of 64 MiB
except RuntimeError as error:
    print(str(error).splitlines()[0])
assert d.isnan().all()
torch.cuda.set_per_process_memory_fraction(1.0)
gmm.multi_tensor_gemm([x], [w], [d], backend="cublas")
assert (d - x @ w).abs().max() < 1e-3
"""


@pytest.mark.gpu
def test_out_of_memory(python: Callable[..., Any]) -> None:
    lines = python(OUT_OF_MEMORY).stdout.splitlines()
    assert len(lines) == 2 and all("memory" in line for line in lines), lines


EARLIER_ERROR = """
import torch, gmm
x, w = torch.randn(64, 128, device="cuda").bfloat16(), torch.randn(2, 128, 256, device="cuda").bfloat16()
offs = torch.tensor([8, 64], device="cuda")
out = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
sm90 = torch.cuda.get_device_capability() == (9, 0)
calls = [
    *([lambda: gmm.multi_tensor_gemm([x], [w[0]], [out], backend="cutlass")] if sm90 else []),
    *([lambda: gmm.grouped_mm(x, w, offs, out=out, backend="cutlass")] if sm90 else []),
    lambda: gmm.multi_tensor_gemm([x], [w[0]], [out], backend="cublas"),
    lambda: gmm.grouped_mm(x, w, offs, out=out, backend="triton"),
]
for call in calls:
    call()
torch.cuda.synchronize()
torch._assert_async(torch.zeros((), device="cuda", dtype=torch.bool))
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
for call in calls:
    try:
        call()
        print("nothing")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


@pytest.mark.gpu
def test_error_of_an_earlier_kernel(python: Callable[..., Any]) -> None:
    """Reported as such by every backend, and the process ends in order."""
    lines = python(EARLIER_ERROR).stdout.splitlines()
    assert lines and all("assert" in line or "earlier work" in line for line in lines), lines


FAILING_CUBLAS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
int gmm_test_fail = 0; /* that many of the next products */
int cublasGemmEx_64(void *a, int b, int c, long d, long e, long f, const void *g, const void *h, int i, long j,
                    const void *k, int l, long m, const void *n, void *o, int p, long q, int r, int s) {
  if (gmm_test_fail > 0 && gmm_test_fail--) return 13; /* CUBLAS_STATUS_EXECUTION_FAILED */
  void *library = dlopen("libcublas.so.13", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) library = dlopen("libcublas.so.12", RTLD_LAZY | RTLD_NOLOAD);
  void *real = dlsym(library, "cublasGemmEx_64");
  return ((int (*)(void *, int, int, long, long, long, const void *, const void *, int, long, const void *, int, long,
                   const void *, void *, int, long, int, int))real)(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q,
                                                                    r, s);
}
"""

CUBLAS_FAILS = """
import ctypes, os, torch, gmm
fail = ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "gmm_test_fail")
x = [torch.randn(8 + i, 128, device="cuda") for i in range(6)]
w = [torch.randn(128, 256, device="cuda") for _ in x]
gmm.multi_tensor_gemm(x, w, backend="cublas")
for _ in range(3):
    fail.value = 1
    try:
        gmm.multi_tensor_gemm(x, w, backend="cublas")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    results = gmm.multi_tensor_gemm(x, w, backend="cublas")
    assert all((y - a @ b).abs().max() < 1e-3 for y, a, b in zip(results, x, w))
"""


@pytest.mark.gpu
@needs_cc
def test_cublas_fails(python: Callable[..., Any], tmp_path: Path) -> None:
    """The streams that had begun are joined, and the next call works."""
    compile_library(tmp_path / "failing.so", FAILING_CUBLAS, "-ldl")
    lines = python(CUBLAS_FAILS, LD_PRELOAD=str(tmp_path / "failing.so")).stdout.splitlines()
    assert len(lines) == 3 and all("cublasGemmEx_64" in line and "EXECUTION_FAILED" in line for line in lines), lines
