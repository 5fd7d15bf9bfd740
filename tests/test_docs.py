"""The pages of docs/: every public name is in the API reference, every page is reached."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIRECTIVES = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
MODULES = {"gmm": ("integrations", "moe", "nn", "__version__"), "gmm.moe": ("KINDS",), "gmm.nn": ()}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    names = set(importlib.import_module(module).__all__) - set(MODULES[module])
    listed = {path.rpartition(".")[2] for path in DIRECTIVES if path.startswith(f"{module}.")}
    assert names and names <= listed, names - listed


def test_the_reference_names_what_there_is() -> None:
    for path in DIRECTIVES:
        if path == "gmm.integrations.torchtitan":  # can be imported only beside torchtitan
            assert (ROOT / "python" / "gmm" / "integrations" / "torchtitan.py").exists()
        else:
            pkgutil.resolve_name(path)


def test_every_page_is_reached() -> None:
    nav, index = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in nav, page
        assert page.name == "index.md" or f"({page.name})" in index, page
