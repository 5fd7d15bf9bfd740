"""The C interface: a C program links libgmm.so and plans without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import gmm

ROOT = Path(__file__).parents[1]
LIBRARY = Path(gmm.__file__).parent / "libgmm.so"


def cublas_folders() -> list[str]:
    """Where the cuBLAS lies that torch brought into this process; a CUDA build of libgmm.so needs it. Else empty."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({str(Path(line.split()[-1]).parent) for line in maps if "libcublas" in line})


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler named cc")
def test_c_program(tmp_path: Path) -> None:
    program = tmp_path / "plan"
    compile_c = ["cc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'csrc' / 'include'}"]
    folders = [str(LIBRARY.parent), *cublas_folders()]
    link = [f"-L{folders[0]}", "-lgmm", *(f"-Wl,-rpath,{folder},-rpath-link,{folder}" for folder in folders)]
    command = [*compile_c, str(ROOT / "tests" / "c" / "plan.c"), "-o", str(program), *link]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert gmm.__version__ in done.stdout


@pytest.mark.skipif(not all(map(shutil.which, ("make", "g++"))), reason="no make or no g++")
def test_malformed_arguments() -> None:
    """A short form of `make fuzz-c`."""
    done = subprocess.run(
        ["make", "-s", "fuzz-c", "FUZZ_SECONDS=2", "SEED=1"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "fuzz: clean" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_only_the_c_interface_is_exported() -> None:
    """No C++ symbol of this library can clash with another's; every function of gmm.h is there."""
    symbols = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in symbols.splitlines()}
    header = (ROOT / "csrc" / "include" / "gmm" / "gmm.h").read_text()
    declared = set(re.findall(r"GMM_API [^;]*?\b(gmm_\w+)\(", header))
    assert len(declared) == 8
    assert declared <= exported
    assert {s for s in exported if "gmm" in s} == declared
