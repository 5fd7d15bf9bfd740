"""Targets: every test that computes runs on each device with each backend that the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cases
import pytest
import torch

import gmm


class Target(NamedTuple):
    """A device and the backend asked for on it."""

    device: torch.device
    backend: str

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What the backend takes for a and b."""
        return cases.HALVES if self.backend == "cutlass" else cases.DTYPES


CPU = pytest.param(Target(torch.device("cpu"), "reference"), id="cpu")
GPU = [
    pytest.param(Target(torch.device("cuda"), backend), id=backend, marks=pytest.mark.gpu)
    for backend in ("cutlass", "cublas", "reference", "auto")
]
CUDA_BACKENDS = GPU[:2]
INTERPRETER = pytest.param(Target(torch.device("cpu"), "triton"), id="triton-interpreter")
GROUPED_GPU = [
    pytest.param(Target(torch.device("cuda"), backend), id=backend, marks=pytest.mark.gpu)
    for backend in ("cutlass", "triton", "cublas", "auto")
]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and keeps torch's CPU kernels to one thread.

    The matrices are small: with two threads on two cores the suite took three times the CPU time, and on a busy machine
    single tests took a minute, because threads spin while they wait for one another."""
    config.addinivalue_line("markers", "memory(gib): needs that much free GPU memory")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, with the reason."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture
def whole_gpu() -> None:
    """For tests that read the whole GPU's free memory."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other workers of the test run use the GPU's memory, too: run it alone")


@pytest.fixture(autouse=True)
def _machine_can_run_it(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("memory")
    if marker and torch.cuda.mem_get_info()[0] < marker.args[0] * 2**30:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < marker.args[0] * 2**30:
            pytest.skip(f"needs {marker.args[0]} GiB of free GPU memory")


@pytest.fixture(params=[CPU, *GPU])
def target(request: pytest.FixtureRequest) -> Target:
    """Each device with each backend."""
    return _checked(request.param)


@pytest.fixture(params=[CPU, GPU[3]])
def auto_target(request: pytest.FixtureRequest) -> Target:
    """Each device, with what the library chooses there."""
    return _checked(request.param)


@pytest.fixture(params=[CPU, *GROUPED_GPU])
def grouped_target(request: pytest.FixtureRequest) -> Target:
    """Each device with each backend of grouped_mm."""
    return _checked(request.param)


@pytest.fixture(params=[CPU, INTERPRETER, *GROUPED_GPU])
def small_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """These, and Triton in its interpreter, which is slow."""
    if request.param.device.type == "cpu" and request.param.backend == "triton":
        pytest.importorskip("triton")
        pytest.importorskip("numpy")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return _checked(request.param)


class MoeTarget(NamedTuple):
    """Where the ops of gmm.moe run: plain torch on the CPU, Triton's interpreter, or a GPU."""

    device: torch.device
    in_triton: bool
    launched: list[str]

    def ran(self) -> set[str]:
        """The kernels launched since the last call."""
        names = set(self.launched)
        self.launched.clear()
        return names


@pytest.fixture(params=["torch", "triton-interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def moe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MoeTarget:
    """Each of them; notes which kernels are launched."""
    target = MoeTarget(torch.device("cuda" if request.param == "cuda" else "cpu"), request.param != "torch", [])
    if request.param == "triton-interpreter":
        pytest.importorskip("triton")
        pytest.importorskip("numpy")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    launch = gmm.moe.launch._launch

    def noted(module: str, name: str, *args: Any) -> None:
        target.launched.append(name)
        launch(module, name, *args)

    monkeypatch.setattr(gmm.moe.launch, "_launch", noted)
    return target


@pytest.fixture(params=CUDA_BACKENDS)
def cuda_target(request: pytest.FixtureRequest) -> Target:
    """The two CUDA backends."""
    return _checked(request.param)


def _checked(target: Target) -> Target:
    if target.backend == "cutlass" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cutlass backend needs an sm90 GPU")
    return target


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    """No test leaves TF32 or a chosen backend to the next."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32
    gmm.use_backend(None)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a fresh interpreter that finds this gmm and these tests."""
    paths = [str(Path(gmm.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def torchrun(processes: int, script: str, *arguments: str, **variables: str) -> str:
    """Runs the script in so many processes; fails with what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(Path(__file__).parents[1] / script), *arguments],
        env=environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """python(code, **variables) runs code in a fresh interpreter; fails with its output."""

    def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run
