"""benchmarks/numerics.py: measures on a CPU as on a GPU; docs/numerics.md says what its JSON says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import numerics


def test_measures_the_reference() -> None:
    results = numerics.measure(torch.device("cpu"), ("reference", "cutlass"), (64,))
    for row in results["errors"]:
        rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-20}[row["out"]]
        assert row["errors"]["reference"] < rounding and row["errors"]["cutlass"] is None
    for text, found in results["facts"].items():
        assert found == {"reference": True, "cutlass": None}, text


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, and a row that depends on another one."""
    right = numerics.gmm.grouped_mm
    monkeypatch.setattr(numerics.gmm, "grouped_mm", lambda x, *a, **o: right(x, *a, **o) + 0.01 * x.sum().to(x.dtype))
    cpu = torch.device("cpu")
    assert not numerics.equal_other_values("reference", cpu) and not numerics.isolated(float("nan"))("reference", cpu)
    assert numerics.errors(cpu, ("reference",), (64,))[0]["errors"]["reference"] > 1e-3


@pytest.mark.skipif(not numerics.RESULTS.exists(), reason="never measured")
def test_document_is_what_was_measured() -> None:
    assert numerics.DOCUMENT.read_text() == numerics.markdown(json.loads(numerics.RESULTS.read_text()))


def test_markdown() -> None:
    errors = dict.fromkeys(numerics.BACKENDS, 1e-3) | {"cutlass": None}
    row = {"pass": "forward", "dtype": "fp32", "out": "fp32", "inputs": "normal", "k": 64, "errors": errors}
    facts = {"a fact": {"cutlass": True, "triton": False, "cublas": None}}
    about = {"gpu": "a GPU", "driver": "1", "torch": "2", "date": "today"}
    text = numerics.markdown(about | {"errors": [row], "facts": facts})
    assert "| forward | fp32 → fp32 | normal | – | 1.0e-03 (1.00) | 1.0e-03 (1.00) |" in text
    assert "| a fact | yes | no | – |" in text
