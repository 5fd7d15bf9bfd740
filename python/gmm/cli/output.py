"""Tables and progress, through rich where it is installed and the output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Row = Sequence[str]


def print_table(title: str, header: Row, rows: Sequence[Row]) -> None:
    """The columns that hold numbers alone are aligned to the right."""
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title, title_justify="left")
            for name, right in zip(header, numeric, strict=True):
                table.add_column(name, justify="right" if right else "left")
            for row in rows:
                table.add_row(*row)
            Console().print(table)
            return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for row in (header, *rows):
        cells = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric, strict=True)]
        print("  ".join(cells).rstrip())


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit() or text in ("", "-")


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, behind a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track as rich_track
    except ImportError:
        for i, item in enumerate(items):
            print(f"\r{what} {i + 1}/{len(items)}", end="", file=sys.stderr, flush=True)
            yield item
        print("\r" + " " * (len(what) + 20) + "\r", end="", file=sys.stderr, flush=True)
    else:
        yield from rich_track(items, what, console=Console(stderr=True), transient=True)
