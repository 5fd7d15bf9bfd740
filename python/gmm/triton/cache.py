"""What autotune has found, on disk: JSON files in GMM_CACHE_DIR, else XDG_CACHE_HOME/gmm, else ~/.cache/gmm.

The folder is made for its user alone; one that others can write to is not used. A file counts only where it names a
tile of configs.py that fits.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from gmm.triton.call import Kind
from gmm.triton.configs import Config, alternatives


def lookup(kind: Kind, limit: int) -> Config | None:
    """The tile found for calls of this kind that fits into `limit` bytes of shared memory; None without."""
    folder = _folder()
    try:
        if _others_can_write(folder):
            return None
        found = json.loads((folder / _file_name(kind)).read_text())
        config = Config(*found["tile"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return config if config in alternatives(kind.precision, kind.n, limit) else None


def store(kind: Kind, config: Config) -> None:
    """Keeps the tile for this and later processes.

    Raises:
        RuntimeError: others can write to the folder.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _others_can_write(folder):
        raise RuntimeError(
            f"GMM_CACHE_DIR: expected a folder that only its user can write to (chmod 700), got {folder}"
        )
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:  # readers never see half of it
        json.dump({"key": _key(kind), "tile": config}, file)
    os.replace(file.name, folder / _file_name(kind))


def _key(kind: Kind) -> list[str | int]:
    return [_device_name(kind.device), kind.precision, kind.mode, kind.rows, kind.n, kind.k]


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _file_name(kind: Kind) -> str:
    return f"triton-{hashlib.sha256(json.dumps(_key(kind)).encode()).hexdigest()[:32]}.json"


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("GMM_CACHE_DIR") or f"{home}/gmm").expanduser()


def _others_can_write(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)
