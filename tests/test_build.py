"""The build: one line says what is missing, the checks on the kernels bite, the wheel holds what it should."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gmm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(gmm.__file__).parent
VERSION = re.search(r'#define GMM_VERSION "(.+)"', (ROOT / "csrc/include/gmm/gmm.h").read_text())[1]  # type: ignore[index]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "cmake" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


locate = load("locate")
check_sm90 = load("check_sm90")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# ---- what is missing


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on PATH, no toolkit and a torch without CUDA wheels; the folder to put things into."""
    for name in ("CUDA_HOME", "CXX", "GMM_CUTLASS_DIR", "GMM_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(locate.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(locate, "SYSTEM_TOOLKIT", str(tmp_path / "no-cuda"))
    return tmp_path


def make_torch(folder: Path, version: str = "2.14.0+cu130", cuda: str | None = "13.0") -> locate.Torch:  # type: ignore[name-defined]
    return locate.Torch(folder / "site-packages/torch", version, cuda)


def make_nvcc(folder: Path, release: str = "13.0") -> Path:
    return script(folder / "bin/nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'")


def stopped(expected: str, function: Callable[..., Any], *args: object) -> None:
    """The call stops the build with one line that has `expected` (a regular expression) in it."""
    with pytest.raises(SystemExit) as stop:
        function(*args)
    message = str(stop.value)
    assert message.startswith("gmm: ") and "\n" not in message
    assert re.search(expected, message), message


def test_no_cmake_or_ninja(bare: Path) -> None:
    stopped("ninja not found: pip install ninja", locate.tool, "ninja")


def test_no_compiler(bare: Path) -> None:
    stopped(r"no C\+\+ compiler: .*apt-get install g\+\+", locate.check_compiler)


def test_no_python_headers(bare: Path) -> None:
    script(bare / "bin/c++", "")
    stopped("Python.h not found: .*python3-dev", locate.check_compiler)


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "capture", lambda *command: "")
    stopped(r"has no torch: pip install 'torch>=2\.10'", locate.torch)


def test_torch_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cu130'\ncuda = '13.0'\n")
    monkeypatch.setattr(locate, "capture", lambda *command: str(tmp_path))
    stopped(r"torch 2\.9\.1\+cu130 is too old: pip install 'torch>=2\.10'", locate.torch)


def test_torch_that_pip_hides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In build isolation pip sets a PYTHONPATH with a sitecustomize that takes the environment's packages away."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.path[:] = [p for p in sys.path if '-packages' not in p]"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hidden = subprocess.run([sys.executable, "-c", "import torch"], cwd=tmp_path, capture_output=True)
    if hidden.returncode == 0:
        pytest.skip("torch is not in a site-packages folder here")
    assert (locate.torch().folder / "version.py").is_file()


def test_no_nvcc(bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert locate.cuda_options(make_torch(bare), bare) == []
    assert "building without the CUDA backends: nvcc not found: set CUDA_HOME" in capsys.readouterr().out
    monkeypatch.setenv("GMM_CUDA", "1")
    expected = r"GMM_CUDA=1, but nvcc not found: .*'nvidia-cuda-nvcc==13\.0\.\*'"
    stopped(expected, locate.cuda_options, make_torch(bare), bare)


def test_torch_without_cuda(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nvcc(bare)
    monkeypatch.setenv("GMM_CUDA", "1")
    torch = make_torch(bare, "2.14.0+cpu", None)
    stopped(r"torch 2\.14\.0\+cpu is a build without CUDA", locate.cuda_options, torch, bare)


@pytest.mark.parametrize("release", ["12.9", "11.8"])
def test_nvcc_of_another_cuda(bare: Path, release: str) -> None:
    make_nvcc(bare, release)
    stopped(f"is of CUDA {release}, torch .* of CUDA 13.0: point", locate.cuda_options, make_torch(bare), bare)


def test_no_cublas(bare: Path) -> None:
    make_nvcc(bare)
    expected = r"cublas_v2\.h and libcublas\.so\.13 .*pip install 'nvidia-cublas==13\.\*'"
    stopped(expected, locate.cuda_options, make_torch(bare), bare)


def test_no_cutlass_row_36(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    stopped("could not be fetched .*git submodule update --init", locate.fetch_cutlass, bare / "cutlass/include")
    assert not any((bare / "cutlass").iterdir())
    monkeypatch.setenv("GMM_CUTLASS_DIR", str(bare))
    stopped(r"no CUTLASS in .*/include: .*GMM_CUTLASS_DIR=", locate.cutlass, bare)


def test_wrong_cuda_home(bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, as images set it without an nvcc; another nvcc is taken where there is one."""
    right, elsewhere = make_nvcc(bare / "toolkit"), make_nvcc(bare)
    for home, nvcc in ((bare / "toolkit", right), (bare / "nowhere", elsewhere)):
        monkeypatch.setenv("CUDA_HOME", str(home))
        assert locate.nvcc(make_torch(bare)) == nvcc
        said = capsys.readouterr().out
        assert said == ("" if nvcc is right else f"gmm: CUDA_HOME={home} has no bin/nvcc: looking for one elsewhere\n")


def test_nvcc_of_the_wheels_row_37(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolkit that is wheels beside torch, and CUTLASS where the environment says."""
    torch = make_torch(bare)
    toolkit = torch.folder.parent / "nvidia/cu13"
    nvcc = make_nvcc(toolkit)
    for name in ("include/cublas_v2.h", "lib/libcublas.so.13", "lib/libcudart_static.a"):
        script(toolkit / name, "")
    script(bare / "cutlass/include/cutlass/version.h", "")
    monkeypatch.setenv("GMM_CUTLASS_DIR", str(bare / "cutlass"))
    options = locate.cuda_options(torch, bare)
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in options
    assert f"-DCMAKE_CUDA_FLAGS=-L{toolkit}/lib" in options
    assert f"-DGMM_CUBLAS_LIBRARY={toolkit}/lib/libcublas.so.13" in options


def test_stop_is_the_last_line() -> None:
    command = [sys.executable, "setup.py", "build_ext"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "GMM_CUDA": "yes"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "gmm: GMM_CUDA: expected auto, 0 or 1, got 'yes'"
    assert "Traceback" not in done.stderr


# ---- the checks on the SM90 kernels


def fatbin(*entries: tuple[int, int, int]) -> bytes:
    """A library's bytes around machine code (kind 2) or PTX (kind 1) for an architecture, with flags."""
    packed = b""
    for kind, arch, flags in entries:
        header = struct.pack("<HHIQIIIIIIQ", kind, 0x101, 64, 32, 0, 0, 0x80001, arch, 0, 0, flags)
        packed += header.ljust(64, b"\0") + b"\x7fELF".ljust(32, b"\0")
    return b"before" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed + b"after"


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([(2, 80, 0x11), (2, 90, 0x100011)], ""),
        ([(2, 80, 0x11), (2, 90, 0x11)], "only sm_80, sm_90"),
        ([(1, 90, 0x108011)], "none at all"),
        ([(2, 100, 0x1100011)], "only sm_100a"),
        ([], "none at all"),
    ],
    ids=["sm_90a", "sm_90", "PTX", "sm_100a", "nothing"],
)
def test_sm90a_code_row_38(tmp_path: Path, capsys: pytest.CaptureFixture[str], entries: list, error: str) -> None:
    library = tmp_path / "libgmm.so"
    library.write_bytes(fatbin(*entries))
    assert check_sm90.check_library(library) == bool(error)
    assert error in capsys.readouterr().err
    assert library.exists() == (not error)  # a build tool takes what is there for good


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
        ("ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
        ("ptxas info    : 0 bytes gmem", 0, 0),
        ("error: expected a ;", 2, 2),
    ],
    ids=["C7510", "C7511", "clean", "error"],
)
def test_serialised_wgmma_row_38(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says: str, status: int, expected: int
) -> None:
    nvcc = script(tmp_path / "nvcc", f'echo "{says}" >&2; touch "$3"; exit {status}')
    output = tmp_path / "kernel.o"
    assert check_sm90.compile_([str(nvcc), "-c", "-o", str(output)]) == expected
    assert says in capsys.readouterr().err
    assert output.exists() == (expected != 1)


# ---- what was built


def dynamic_section(library: Path) -> tuple[set[str], list[str]]:
    """The libraries that `library` needs, and where it looks for them."""
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    path = re.search(r"\(RUNPATH\).*\[(.+)\]", text)
    return needed, path[1].split(":") if path else []


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
@pytest.mark.parametrize("name", ["libgmm.so", "_C.so", "_core*.so"])
def test_libraries(name: str) -> None:
    """They find one another, and cuBLAS, by relative paths; load without a driver; and need no CUDA build of torch."""
    (library,) = (found for found in PACKAGE.glob(name) if "_core" not in name or found.name == core_name())
    needed, path = dynamic_section(library)
    assert path and all(folder.startswith("$ORIGIN") for folder in path)
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    system |= {"libpthread.so.0", "libdl.so.2", "librt.so.1"}
    own = {"libgmm.so": r"libcublas\.so\.\d+", "_C.so": r"libgmm\.so|libtorch_cpu\.so"}.get(name, r"libgmm\.so")
    assert {n for n in needed - system if not re.fullmatch(own, n)} == set()
    assert library.stat().st_size < 30e6


def core_name() -> str:
    return "_core" + str(sysconfig.get_config_var("EXT_SUFFIX"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without CUDA, built from a copy of what a wheel is built from."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in ("cmake", "csrc", "python"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("CMakeLists.txt", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(tree),
    ]
    done = subprocess.run(pip, env={**os.environ, "GMM_CUDA": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"torch_gmm-{VERSION}.dist-info/METADATA").decode()
    libraries = {name for name in names if re.search(r"\.so(\.|$)", name)}
    assert libraries == {"gmm/libgmm.so", "gmm/_C.so", f"gmm/{core_name()}"}  # nothing of torch's or CUDA's
    assert {"gmm/py.typed", "gmm/include/gmm/gmm.h", f"torch_gmm-{VERSION}.dist-info/licenses/LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {"gmm", f"torch_gmm-{VERSION}.dist-info"}
    requires = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    assert [line for line in requires if "extra ==" not in line] == ["torch>=2.10"]
    assert f"Version: {VERSION}" in metadata and "Requires-Python: >=3.10" in metadata


def test_wheel_installs_and_runs(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(wheel)], check=True)
    code = """
import torch, gmm
a, b = torch.randn(3, 4), torch.randn(4, 5)
torch.testing.assert_close(gmm.multi_tensor_gemm([a], [b])[0], a @ b)
print(gmm.__file__, gmm.__version__)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "site/gmm/__init__.py"), VERSION]
