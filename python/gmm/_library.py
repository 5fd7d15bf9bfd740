"""Loads the compiled parts: libgmm.so (kernels), _core (plans and facts), _C.so (torch.ops.gmm)."""

from __future__ import annotations

from pathlib import Path

import torch  # first: libgmm.so uses the cuBLAS that torch has loaded

_FOLDER = Path(__file__).parent
_REBUILD = "rebuild it with: pip install --no-build-isolation --force-reinstall --no-deps ."


def _missing(what: object) -> ImportError:
    return ImportError(
        f"gmm's compiled parts are missing for this Python ({what}): run 'pip install --no-build-isolation .' in its "
        "source folder, and do not import it from there unless it was installed with -e"
    )


for _name in ("libgmm.so", "_C.so"):
    if not (_FOLDER / _name).exists():
        raise _missing(f"no {_FOLDER / _name}")

try:
    import gmm._core as core
except ModuleNotFoundError as error:
    raise _missing(error) from error
except ImportError as error:
    raise ImportError(
        f"gmm was built for another CUDA than torch {torch.__version__}'s ({error}): {_REBUILD}"
    ) from error

try:
    torch.ops.load_library(_FOLDER / "_C.so")
except OSError as error:
    reason = error.__cause__ or error
    raise ImportError(f"gmm needs torch >= 2.10, this is {torch.__version__} ({reason}): {_REBUILD}") from error

version = core.version


def build_info() -> dict[str, str]:
    """Fixed facts of this build: version, cuda (nvcc's version or "none"), cutlass, cublas, archs, compiler."""
    return core.build_info()
