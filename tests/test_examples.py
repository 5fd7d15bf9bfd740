"""examples/train_moe_lm.py at small size. The other examples are run by the tests of what they show."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_moe_lm.py"


def test_train_moe_lm() -> None:
    command = [sys.executable, str(EXAMPLE), "--json", "--steps=40", "--batch=8", "--length=32", "--hidden=32"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    losses = result["losses"]
    assert len(losses) == 40 and result["backend"]
    assert sum(losses[-5:]) / 5 < losses[0] - 0.8, losses


def test_plot_without_matplotlib(tmp_path: Path) -> None:
    """Said before the training, not after it."""
    hide = "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = ['x', '--plot', 'loss.png']\n"
    command = [sys.executable, "-c", hide + f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.endswith("--plot needs matplotlib: pip install matplotlib\n")
    assert not done.stdout
