"""What this machine has, which kernels a call takes and why, how fast they are, and whether they are right.

    python -m gmm info
    python -m gmm explain --shape 128,512,1536,2048 --sm 90
    python -m gmm bench --shape 128,512,1536,2048 --json bench.json --plot bench.png
    python -m gmm selftest

Tables come through rich where it is installed and the output is a terminal. Exit status: 0, 1 where something is
wrong, 2 where the command cannot do what it was asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gmm.cli import bench, explain, info, selftest

_COMMANDS = {"info": info, "explain": explain, "bench": bench, "selftest": selftest}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command with these arguments, or the process's. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gmm", description=_summary(sys.modules[__name__].__doc__))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        text = _summary(module.__doc__)
        module.add_arguments(commands.add_parser(name, help=text, description=text))
    options = parser.parse_args(argv)
    try:
        return _COMMANDS[options.command].run(options)
    except (OSError, RuntimeError, ValueError) as error:  # what the library refuses, a file that cannot be written
        print(f"python -m gmm {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _summary(doc: str | None) -> str:
    return (doc or "").split("\n\n")[0].replace("\n", " ")
