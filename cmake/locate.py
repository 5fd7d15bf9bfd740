"""Finds what the build needs on this machine. What is missing stops it with one line that says how to get it."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TORCH_MIN = (2, 10)  # the first with lists of tensors in the stable ABI
SYSTEM_TOOLKIT = "/usr/local/cuda"
NVCC_MIN = (12, 5)  # the first with cudaGetDriverEntryPointByVersion


class Torch(NamedTuple):
    folder: Path
    version: str
    cuda: str | None  # None: a build without CUDA


def stop(why: str) -> NoReturn:
    raise SystemExit(f"gmm: {why}")


def capture(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def version_pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def tool(name: str) -> str:
    """A program of this Python environment or, failing that, of PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or stop(f"{name} not found: pip install {name}")


def check_compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        stop("no C++ compiler: install g++ (apt-get install g++), or set CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        stop("Python.h not found: install Python's headers (apt-get install python3-dev)")


def pybind11() -> str:
    """Folder of pybind11's CMake files."""
    if not importlib.util.find_spec("pybind11"):
        stop("pybind11 not found: pip install pybind11")
    import pybind11

    return pybind11.get_cmake_dir()


def torch() -> Torch:
    """The torch to build against: the one that this environment imports.

    In pip's build isolation that is not the one that this process sees, but the one that the same interpreter sees
    without the PYTHONPATH that pip sets.
    """
    at_least = "torch>=" + ".".join(map(str, TORCH_MIN))
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    found = capture(sys.executable, "-c", code) or capture(sys.executable, "-E", "-c", code)
    if not found:
        stop(f"{sys.executable} has no torch: pip install '{at_least}', then this package with --no-build-isolation")
    facts = runpy.run_path(f"{found}/version.py")  # importing torch itself takes seconds
    if version_pair(facts["__version__"]) < TORCH_MIN:
        stop(f"torch {facts['__version__']} is too old: pip install '{at_least}'")
    return Torch(Path(found), facts["__version__"], facts["cuda"])


def nvcc(torch: Torch) -> Path | None:
    """CUDA_HOME's, PATH's, that of the nvidia-cuda-nvcc wheel beside torch, or /usr/local/cuda's."""
    home = os.environ.get("CUDA_HOME")
    if home and not shutil.which("nvcc", path=f"{home}/bin"):
        print(f"gmm: CUDA_HOME={home} has no bin/nvcc: looking for one elsewhere", flush=True)
    wheels = torch.folder.parent.glob("nvidia/cu*/bin")
    folders = [*([f"{home}/bin"] if home else []), *os.get_exec_path(), *map(str, wheels), f"{SYSTEM_TOOLKIT}/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    return Path(found) if found else None


def cublas(torch: Torch, toolkit: Path, cuda_major: int) -> tuple[Path, Path]:
    """Include folder and library of the cuBLAS that torch loads, else of the toolkit."""
    wheels = torch.folder.parent / "nvidia"
    for root in (wheels / f"cu{cuda_major}", wheels / "cublas", toolkit, toolkit / "targets/x86_64-linux"):
        libraries = sorted(root.glob(f"lib*/libcublas.so.{cuda_major}"))
        if libraries and (root / "include/cublas_v2.h").is_file():
            return root / "include", libraries[0]
    stop(
        f"cublas_v2.h and libcublas.so.{cuda_major} found neither beside torch nor in {toolkit}: "
        f"pip install 'nvidia-cublas=={cuda_major}.*', or GMM_CUDA=0 for a build without CUDA"
    )


def cutlass(build: Path) -> Path:
    """Include folder of CUTLASS: GMM_CUTLASS_DIR's, third_party/cutlass's, or headers fetched into `build`."""
    given = os.environ.get("GMM_CUTLASS_DIR")
    include = Path(given or ROOT / "third_party/cutlass").resolve() / "include"
    if not given and not include.is_dir():
        include = build / "cutlass/include"
        if not include.is_dir():
            fetch_cutlass(include)
    if not (include / "cutlass/version.h").is_file():
        stop(f"no CUTLASS in {include}: git submodule update --init, or GMM_CUTLASS_DIR=/path/to/cutlass")
    return include


def fetch_cutlass(include: Path) -> None:
    """The headers alone, out of the package that cutlass.txt pins by version and hash; pip checks the hash."""
    print("gmm: third_party/cutlass is empty: fetching the headers of the package in cmake/cutlass.txt", flush=True)
    include.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=include.parent) as scratch:
        pip = [sys.executable, "-E", "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        if subprocess.run([*pip, "-r", str(ROOT / "cmake/cutlass.txt")]).returncode:
            stop(
                "the CUTLASS headers could not be fetched (pip's reason is above): git submodule update --init, "
                "GMM_CUTLASS_DIR=/path/to/cutlass, or GMM_CUDA=0 for a build without CUDA"
            )
        prefix = "cutlass_library/source/include/"
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(prefix)])
        Path(scratch, prefix).rename(include)


def cuda_options(torch: Torch, build: Path) -> list[str]:
    """What CMake needs to know for the CUDA backends; empty for a build without them."""
    mode = os.environ.get("GMM_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        stop(f"GMM_CUDA: expected auto, 0 or 1, got {mode!r}")
    if mode == "0":
        return []
    compiler = nvcc(torch)
    if not torch.cuda or not compiler:
        if torch.cuda:
            names = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm")
            wheels = " ".join(f"'{name}=={torch.cuda}.*'" for name in names)
            why = f"nvcc not found: set CUDA_HOME, put it on PATH, or pip install {wheels}"
        else:
            why = f"torch {torch.version} is a build without CUDA: install one with"
        if mode == "1":
            stop(f"GMM_CUDA=1, but {why}")
        print(f"gmm: building without the CUDA backends: {why}", flush=True)
        return []
    release = re.search(r"release (\d+\.\d+)", capture(compiler, "--version"))
    cuda = version_pair(release[1] if release else "0.0")
    if cuda < NVCC_MIN or cuda[0] != version_pair(torch.cuda)[0]:
        stop(
            f"{compiler} is of CUDA {cuda[0]}.{cuda[1]}, torch {torch.version} of CUDA {torch.cuda}: point CUDA_HOME "
            "at a toolkit of the same major version, or GMM_CUDA=0 for a build without CUDA"
        )
    toolkit = compiler.resolve().parent.parent
    include, library = cublas(torch, toolkit, cuda[0])
    # A toolkit of wheels has its libraries in lib, and its nvcc looks in lib64.
    of_wheels = (toolkit / "lib/libcudart_static.a").is_file() and not (toolkit / "lib64").is_dir()
    return [
        "-DGMM_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={compiler}",
        f"-DCMAKE_CUDA_FLAGS={f'-L{toolkit}/lib' if of_wheels else ''}",
        f"-DGMM_CUBLAS_INCLUDE={include}",
        f"-DGMM_CUBLAS_LIBRARY={library}",
        f"-DGMM_CUTLASS_INCLUDE={cutlass(build)}",
    ]
