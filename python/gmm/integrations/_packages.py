"""How the integrations get the libraries that they are for."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, package: str) -> Any:
    """That module. Raises ImportError in one line where it is missing, saying what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"gmm needs {module}, which is missing ({error}): pip install -U {package}") from error
