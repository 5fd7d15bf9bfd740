"""Builds gmm: finds torch, nvcc, cuBLAS and CUTLASS (cmake/locate.py), then lets CMake and Ninja make the libraries.

GMM_CUDA         auto (default): the CUDA backends are built when nvcc is there and torch is a CUDA build;
                 0: they are not; 1: they are, or the build stops
CUDA_HOME        the toolkit to use; else nvcc on PATH, the nvidia-cuda-nvcc wheel beside torch, /usr/local/cuda
GMM_CUTLASS_DIR  a CUTLASS checkout; else third_party/cutlass, else the headers of cmake/cutlass.txt's package
MAX_JOBS         compilers at a time; by default as many as cores and memory allow
"""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SETUPTOOLS_MIN = 77  # the first that reads pyproject.toml's license field
GIB_PER_JOB = 6  # what nvcc takes for the largest CUTLASS file

sys.path.insert(0, str(ROOT / "cmake"))
import locate  # noqa: E402

if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS_MIN:
    locate.stop(f"setuptools {setuptools.__version__} is too old: pip install 'setuptools>={SETUPTOOLS_MIN}'")


class CMakeBuild(build_ext):
    """One CMake run makes all libraries and lays them into the package (the one in the source tree when editable)."""

    def run(self) -> None:
        cmake, ninja = locate.tool("cmake"), locate.tool("ninja")
        locate.check_compiler()
        pybind11, torch = locate.pybind11(), locate.torch()
        cuda = locate.cuda_options(torch, ROOT / "build")
        build = str(ROOT / "build" / ("cuda" if cuda else "cpu"))  # apart: neither throws the other's objects away
        build_py = self.get_finalized_command("build_py")
        package = build_py.get_package_dir("gmm") if self.inplace else f"{self.build_lib}/gmm"
        Path(build).mkdir(parents=True, exist_ok=True)
        # One build at a time: two in one folder delete each other's lists of headers, and the next one misses changes.
        with open(f"{build}/.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.step(
                *(cmake, "-S", str(ROOT), "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
                *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"),
                *(f"-DGMM_TORCH_DIR={torch.folder}", *cuda),
            )
            self.step(cmake, "--build", build, "--parallel", os.environ.get("MAX_JOBS") or str(self.jobs()))
            self.step(cmake, "--install", build, "--prefix", os.path.abspath(package))

    @staticmethod
    def step(*command: str) -> None:
        if subprocess.run(command).returncode:
            locate.stop(f"{' '.join(command[:3])} failed: the reason is above")

    @staticmethod
    def jobs() -> int:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30
        return max(1, min(len(os.sched_getaffinity(0)), memory // GIB_PER_JOB))


setup(
    version=re.findall(r'#define GMM_VERSION "(.+)"', (ROOT / "csrc/include/gmm/gmm.h").read_text())[0],
    ext_modules=[Extension("gmm._core", [])],  # the name alone: CMakeLists.txt lists the sources
    cmdclass={"build_ext": CMakeBuild},
)
