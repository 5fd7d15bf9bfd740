"""tests/sanitize.py makes its calls, and c_api.py says what gmm.h says."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import c_api
import pytest
import sanitize
import torch
from conftest import environment

SCRIPT = Path(__file__).with_name("sanitize.py")


def test_structs_have_the_librarys_sizes() -> None:
    args = c_api.Args(0)
    with pytest.raises(RuntimeError, match="struct_size") as error:
        c_api.plan(args)
    assert re.findall(r"at least (\d+)", str(error.value)) == [str(ctypes.sizeof(c_api.Args))]
    args.struct_size = ctypes.sizeof(args)
    result = c_api.PlanResult(1)
    assert c_api.library.gmm_plan(ctypes.byref(args), None, ctypes.byref(result))
    assert f"at least {ctypes.sizeof(result)}" in c_api.library.gmm_last_error().decode()


def test_canaries_see_what_is_beside_a_tensor() -> None:
    guarded = sanitize.buffer(torch.zeros(3, 8), exact=False)
    assert guarded.intact()
    guarded.memory[127] = 0
    assert not guarded.intact()


def test_only_known_hazards_pass() -> None:
    race = (
        "========= Warning: Race reported between Read access at "
        "void cutlass::device_kernel<gmm::sm90::{}::GroupedGemm<"
        "cute::tuple<cute::C<(int){}>, cute::C<(int)128>, cute::C<(int)128>>"
    )
    lines = [
        race.format("pointer_array", 64),
        "sanitize: sm90_pointer_array 4",
        "========= RACECHECK SUMMARY: 1 hazards displayed (0 errors, 1 warnings)",
    ]
    assert sanitize.only_known(lines)
    assert not sanitize.only_known(lines[::2])  # the calls were not made
    assert not sanitize.only_known([race.format("descriptor_array", 64), *lines[1:]])
    assert not sanitize.only_known([race.format("pointer_array", 128), *lines[1:]])
    assert not sanitize.only_known([lines[0].replace("cutlass::device_kernel<", "fill<"), *lines[1:]])
    assert not sanitize.only_known([*lines[:2], lines[2].replace("1 hazards", "2 hazards")])


def test_every_kernel_stays_within_its_memory() -> None:
    """Canaries around outputs and workspaces, operands of exactly their size, hostile ends. Without a GPU the kernels
    are only planned."""
    command = [sys.executable, str(SCRIPT), "--calls"]
    env = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("sanitize: sm90_")
