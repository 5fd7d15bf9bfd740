"""Two checks on the SM90 kernels, for what a compiler passes over in silence and users then pay for in speed.

check_sm90.py compile nvcc ...     runs the compiler; fails, too, when ptxas reports a performance loss: serialised
                                   wgmma (C7510, C7511, ...) or an ignored setmaxnreg
check_sm90.py library libgmm.so    fails when there is no sm_90a code in it: CUTLASS's kernels compile to nothing
                                   for every other architecture, plain sm_90 among them
"""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
KIND_ELF = 2  # machine code; 1 is PTX
ARCH_SPECIFIC = 1 << 20  # flag of an entry: sm_90a, not sm_90. Seen with nvcc 12.6 and 13.0


def compile_(command: list[str]) -> int:
    """Runs nvcc; its exit status, or 1 when ptxas reported a performance loss."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    sys.stderr.write(done.stderr)
    if done.returncode == 0 and "Potential Performance Loss" in done.stderr:
        output = Path(command[command.index("-o") + 1])
        output.unlink(missing_ok=True)  # else the next build takes it for good
        print(f"error: {output.name}: ptxas serialised wgmma or ignored setmaxnreg, see above", file=sys.stderr)
        return 1
    return done.returncode


def fatbin_entries(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(kind, architecture, flags) of all that nvcc embedded in a library."""
    at = -1
    while (at := data.find(struct.pack("<I", FATBIN_MAGIC), at + 1)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end = at + header, min(at + header + size, len(data))
        while entry + 48 <= end:
            kind, _, header, payload, _, _, _, arch, _, _, flags = struct.unpack_from("<HHIQIIIIIIQ", data, entry)
            yield kind, arch, flags
            entry += max(header + payload, 1)


def check_library(path: Path) -> int:
    entries = fatbin_entries(path.read_bytes())
    found = {f"sm_{arch}{'a' if flags & ARCH_SPECIFIC else ''}" for kind, arch, flags in entries if kind == KIND_ELF}
    if "sm_90a" in found:
        return 0
    path.unlink()
    print(f"error: {path.name} has no sm_90a code, only {', '.join(sorted(found)) or 'none at all'}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(compile_(sys.argv[2:]) if sys.argv[1] == "compile" else check_library(Path(sys.argv[2])))
