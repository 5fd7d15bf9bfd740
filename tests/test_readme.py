"""The README's Python examples run as written, one after the other."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_examples() -> None:
    text = README.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(README), "exec"), namespace)


def test_figures_are_those_measured() -> None:
    sys.path.insert(0, str(README.parent / "benchmarks"))
    from readme_figures import updated

    assert README.read_text() == updated(README.read_text()), "run benchmarks/readme_figures.py"
