"""
Compile the expert kernel: one source, every target, by `python wasm/build.py --out DIR`.

The compiler is zig's clang from the PyPI package `ziglang`, so a fresh machine needs no toolchain. What
matters for byte-identity is in COMMON: no contraction of a*b+c into one rounding, no fast-math. Up-to-date
outputs are skipped: beside them lies a stamp with the hash of sources and flags.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOM = Path(__file__).resolve().parent
ROOT = ROOM.parent
STAMPS = ".kernel-stamps.json"

COMMON = (
    "-std=c11 -O3 -ffp-contract=off -fno-fast-math -fno-sanitize=all -fvisibility=hidden -g0 "
    "-Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror"
).split()
# Windows wants the export named on every declaration; ours stands on the definition.
NATIVE = ["-shared", "-s", *(["-Wno-dll-attribute-on-redeclaration"] if os.name == "nt" else ["-fPIC"])]
WASM_CPU = "generic+simd128+bulk_memory+sign_ext+nontrapping_fptoint"
WASM = (
    "-target wasm32-freestanding -nostdlib -Wl,--no-entry -Wl,--export=__heap_base -Wl,-z,stack-size=65536 -s"
).split()


class BuildError(Exception):
    """The compiler refused; the message carries what it said."""


@dataclass(frozen=True, slots=True)
class Target:
    """One output: its file and the flags that make it."""

    name: str
    file: str
    flags: tuple[str, ...]


def _native(name: str, suffix: str, *flags: str) -> Target:
    return Target(name, f"libexpert-{name}{suffix}", (*NATIVE, *flags))


def _relaxed(bits: int) -> Target:
    """Make a build with one of the two relaxed products (simd.h)."""
    name = f"relaxed{bits}"
    flags = (*WASM, f"-mcpu={WASM_CPU}+relaxed_simd", f"-DEXPERT_RELAXED={bits}")
    return Target(name, f"kernel-{name}.wasm", flags)


def _targets() -> dict[str, Target]:
    """Every target this page knows, for any host."""
    mac = sys.platform == "darwin"
    arm = "aarch64-macos" if mac else "aarch64-linux-gnu.2.17"
    intel = "x86_64-macos" if mac else "x86_64-windows-gnu" if os.name == "nt" else "x86_64-linux-gnu.2.17"
    suffix = ".dylib" if mac else ".dll" if os.name == "nt" else ".so"
    scalar = arm if _is_arm() else intel
    table = (
        Target("plain", "kernel-plain.wasm", (*WASM, f"-mcpu={WASM_CPU}")),
        _relaxed(16),
        _relaxed(32),
        _native("scalar", suffix, "-target", scalar, "-DEXPERT_SCALAR"),
        _native("sse41", suffix, "-target", intel, "-mcpu=x86_64+ssse3+sse4_1"),
        _native("avx2", suffix, "-target", intel, "-mcpu=x86_64_v3"),
        _native("avx512vnni", suffix, "-target", intel, "-mcpu=x86_64_v4+avx512vnni"),
        # Every Mac has the dot product instructions; a Linux board may not.
        _native("neon", suffix, "-target", arm, "-mcpu=apple_m1" if mac else "-mcpu=generic"),
    )
    return {target.name: target for target in table}


def _is_arm() -> bool:
    return platform.machine().lower() in ("arm64", "aarch64")


TARGETS = _targets()
NATIVE_TARGETS = ("scalar", "neon") if _is_arm() else ("scalar", "sse41", "avx2", "avx512vnni")
WASM_TARGETS = ("plain", "relaxed16", "relaxed32")


def sources() -> list[Path]:
    """Give the C files of the kernel, in a fixed order."""
    return sorted(ROOM.glob("*.c")) + sorted((ROOM / "formats").glob("*.c"))


def _stamp(target: Target) -> str:
    """Hash everything that decides the output."""
    digest = hashlib.sha256("\0".join([*COMMON, *target.flags]).encode())
    for path in [*sources(), *sorted(ROOM.rglob("*.h")), ROOM / "hashes.txt"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _compile(target: Target, out: Path) -> None:
    """Compile into a temporary file and move it into place, so that nobody loads half a library."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        fresh = Path(scratch) / target.file
        files = [str(path) for path in sources()]
        command = [sys.executable, "-m", "ziglang", "cc", *COMMON, *target.flags, *files, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOM, check=False)
        if done.returncode:
            raise BuildError(f"{target.file} does not compile:\n{done.stderr.strip()}")
        os.replace(fresh, out / target.file)


def build(out_dir: Path, targets: Sequence[str] | None = None) -> list[Path]:
    """
    Build the named targets (default: wasm and what this host can run) into `out_dir`; return their paths.

    Raises:
        BuildError: the compiler refused.
        KeyError: no such target.
    """
    wanted = [TARGETS[name] for name in targets or (*WASM_TARGETS, *NATIVE_TARGETS)]
    out_dir.mkdir(parents=True, exist_ok=True)
    stamps_path = out_dir / STAMPS
    try:
        stamps: dict[str, str] = json.loads(stamps_path.read_text())
    except (OSError, ValueError):
        stamps = {}
    fresh = {target.file: _stamp(target) for target in wanted}
    stale = [t for t in wanted if stamps.get(t.file) != fresh[t.file] or not (out_dir / t.file).is_file()]
    if stale:
        with ThreadPoolExecutor(min(len(stale), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda target: _compile(target, out_dir), stale))
        stamps_path.write_text(json.dumps(stamps | fresh, indent=1, sort_keys=True) + "\n")
    return [out_dir / target.file for target in wanted]


def build_default() -> list[Path]:
    """Build into the places from which relay and backbone load."""
    return [
        *build(ROOT / "relay" / "_built", WASM_TARGETS),
        *build(ROOT / "backbone" / "_built", NATIVE_TARGETS),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the expert kernel.")
    parser.add_argument(
        "--out", type=Path, help="one folder for everything (default: where the packages look)"
    )
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="only this; may be repeated"
    )
    args = parser.parse_args()
    if args.target and not args.out:
        parser.error("--target needs --out")
    try:
        paths = build(args.out, args.target) if args.out else build_default()
    except BuildError as exc:
        print(exc, file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path} {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
