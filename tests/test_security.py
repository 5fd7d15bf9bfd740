"""What the package never does: run code out of data or the environment, unpickle, write outside of its cache folder.

The cache folder's permissions are tested in test_triton.py (test_cache, test_cache_folder_of_others_is_refused), what a
wheel holds in test_build.py (test_wheel_contents).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gmm

ROOT = Path(__file__).parents[1]
SOURCES = sorted(Path(gmm.__file__).parent.rglob("*.py"))
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "subprocess",
    "pty",
    "socket",
    "urllib",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "system", "popen", "loads", "torch.load", "__import__"}
# What may be set: the choice of a backend, a check, a number, and a folder.
VARIABLES = {"GMM_BACKEND", "GMM_CHECK_OFFSETS", "GMM_CUBLAS_STREAMS", "GMM_CACHE_DIR"}
OTHERS_VARIABLES = {"XDG_CACHE_HOME", "TRITON_INTERPRET"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_code_is_made_of_data() -> None:
    assert len(SOURCES) > 15
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                )
                assert not {name.split(".")[0] for name in names} & FORBIDDEN_MODULES, f"{file}:{node.lineno}"
        for name, node in calls(tree):
            bad = name in FORBIDDEN_CALLS or name.split(".")[-1] in FORBIDDEN_CALLS - {"compile", "loads"}
            assert not bad or name == "json.loads", f"{file}:{node.lineno}: {name}"


def test_variables_that_are_read() -> None:
    """Each is known; none becomes a path to load from, or code."""
    read = set()
    for file in SOURCES:
        for name, node in calls(ast.parse(file.read_text())):
            if name in ("os.environ.get", "os.getenv"):
                assert isinstance(node.args[0], ast.Constant), f"{file}:{node.lineno}"
                read.add(node.args[0].value)
        assert not re.search(r"os\.environ\[", file.read_text()), file
    for file in (ROOT / "csrc").rglob("*.*"):
        read |= set(re.findall(r'getenv\("(\w+)"\)', file.read_text()))
    assert read == VARIABLES | OTHERS_VARIABLES
    documents = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    assert all(name in documents for name in VARIABLES)


WATCHED = """
import os, sys
written = set()
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, str) and (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.add(os.path.realpath(path))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.chmod"):
        written.add(os.path.realpath(arguments[0]))
    elif event in ("subprocess.Popen", "os.system", "socket.connect"):
        watched.append((event, arguments[0])) if armed else None
watched, armed = [], False
import torch
import triton
sys.addaudithook(watch)
armed = True
import gmm, gmm.triton
from gmm.triton import cache, call, configs
x, w = torch.randn(24, 16), torch.randn(2, 16, 8, requires_grad=True)
ends = torch.tensor([8, 24])
gmm.multi_tensor_gemm([x], [w.detach()[0]])
gmm.grouped_mm(x, w, ends).sum().backward()
gmm.grouped_mm(x, w.detach(), ends, backend="triton")
gmm.explain((24, 16), (2, 16, 8), sm=90)
kind = call.describe(x, w.detach(), ends, torch.empty(24, 8), None, False, False).kind
cache.store(kind, configs.alternatives(kind.precision, kind.n, 2**17)[0])
assert cache.lookup(kind, 2**17)
folder = os.path.realpath(os.environ["GMM_CACHE_DIR"])
outside = {path for path in written if not path.startswith((folder, "/dev/")) and "torchinductor" not in path}
assert not outside, outside
assert not watched, watched
assert any(path.startswith(folder) for path in written)
assert os.stat(folder).st_mode & 0o777 == 0o700
assert all(os.stat(os.path.join(folder, name)).st_mode & 0o777 == 0o600 for name in os.listdir(folder))
"""


def test_nothing_is_written_outside_of_the_cache(python: Callable[..., Any], tmp_path: Path) -> None:
    """Nor is a program started, or a connection opened, by a run of every part on the CPU."""
    variables = {"GMM_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    python(WATCHED, **variables)
