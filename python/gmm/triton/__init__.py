"""Grouped GEMM in Triton: one launch for any number of groups, on every device that Triton compiles for.

kernels.py is the device code, call.py describes a call, configs.py has the table of tiles, launch.py launches. tune.py
tunes ahead of time, and cache.py keeps what it finds. Triton need not be there to import gmm.triton.
"""

from typing import Any

from gmm.triton.launch import grouped_mm, launch_path, supports

__all__ = ["autotune", "grouped_mm", "launch_path", "supports"]


def __getattr__(name: str) -> Any:
    if name == "autotune":  # needs Triton itself
        from gmm.triton.tune import autotune

        return autotune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
