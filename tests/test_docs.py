"""The pages of docs/: the API reference has every public name and every argument, every page is reached."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gmm

ROOT = Path(__file__).parents[1]
API = (ROOT / "docs" / "api.md").read_text()
DIRECTIVES = re.findall(r"^::: (\S+)$", API, re.MULTILINE)
PACKAGES = ["gmm", *(found.name for found in pkgutil.walk_packages(gmm.__path__, "gmm.") if found.ispkg)]


def public_names() -> list[str]:
    """Those in the __all__ of gmm and of each package in it."""
    found = ((package, getattr(importlib.import_module(package), "__all__", ())) for package in PACKAGES)
    return [f"{package}.{name}" for package, names in found for name in names]


def what_is_at(path: str) -> Any:
    """A submodule and a function of it may have one name: the package's attribute is what users get."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def referenced() -> dict[str, Any]:
    """What the directives name, by directive; not what needs a package that may not be there."""
    left_out = {"gmm.integrations.torchtitan"}  # test_torchtitan.py imports it where torchtitan is
    if importlib.util.find_spec("triton") is None:
        left_out.add("gmm.triton.tune.autotune")
    return {path: pkgutil.resolve_name(path) for path in DIRECTIVES if path not in left_out}


def test_each_package_is_looked_into() -> None:
    assert {"gmm.Plan", "gmm.moe.KINDS", "gmm.nn.GroupedLinear", "gmm.triton.autotune"} <= set(public_names())


@pytest.mark.parametrize("path", public_names())
def test_every_public_name_is_in_the_reference(path: str) -> None:
    """By a directive for itself or its module, or in the text; a module by those of its names, too."""
    if path == "gmm.triton.autotune":
        pytest.importorskip("triton")
    value = what_is_at(path)
    if isinstance(value, str):
        assert f"`{path}`" in API
    elif isinstance(value, ModuleType):
        assert any(directive == path or directive.startswith(f"{path}.") for directive in DIRECTIVES)
    else:
        holder = sys.modules.get(getattr(value, "__module__", ""))
        assert any(there is value or there is holder for there in referenced().values())


def test_the_torchtitan_module_is_where_the_reference_says() -> None:
    assert "gmm.integrations.torchtitan" in DIRECTIVES
    assert (Path(gmm.integrations.__file__).parent / "torchtitan.py").exists()


def documented() -> list[Any]:
    """The functions and classes of the reference, those of its modules, and the methods of these classes."""
    found: dict[str, Any] = {}
    for path, value in referenced().items():
        if isinstance(value, ModuleType):
            found |= {f"{path}.{name}": x for name, x in public(value) if getattr(x, "__module__", "") == path}
        else:
            found[path] = value
    classes = [(path, value) for path, value in found.items() if inspect.isclass(value)]
    found |= {f"{path}.{name}": x for path, value in classes for name, x in public(value) if inspect.isfunction(x)}
    return [pytest.param(value, id=path) for path, value in found.items() if callable(value)]


def public(holder: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(holder).items() if not name.startswith("_")]


@pytest.mark.parametrize("value", documented())
def test_one_entry_for_each_argument(value: Any) -> None:
    """Where there are entries: in the order of the signature, and none for what is not in it."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        names = list(inspect.signature(value).parameters)[inspect.isfunction(value) and "." in value.__qualname__ :]
    text = (inspect.getdoc(value) or "") + "\n"
    section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n)+)", text, re.MULTILINE)
    if section or dataclasses.is_dataclass(value):
        assert section and re.findall(r"^ {4}(\w[^:]*): ", section[1], re.MULTILINE) == names


def test_every_page_is_reached() -> None:
    nav, index = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in nav, page
        assert page.name == "index.md" or f"({page.name})" in index, page
