"""Keep an end's long-lived key in a file that only its owner can read."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from backbone.errors import ConfigError
from relay.wire.seal import SealIdentity


def default_key_file(environment: Mapping[str, str], program: str) -> Path:
    """Give the place in this user's XDG state folder."""
    home = Path(environment.get("HOME", "."))
    state = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state")
    return state / "expertswarm" / f"{program}-key.pem"


def kept_identity(path: Path) -> SealIdentity:
    """
    Read the key, or make one that is mode 0600.

    Raises:
        ConfigError: others may read it, it is no Ed25519 key, or it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as exc:
        raise ConfigError(f"the key {path} cannot be kept: {exc.strerror or exc}") from exc


def _make(path: Path) -> None:
    """Put a new key there, whole or not at all: programs that start at once share the first one's."""
    key = Ed25519PrivateKey.generate()
    with NamedTemporaryFile(dir=path.parent, prefix=path.name) as file:  # mode 0600
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def _read(path: Path) -> SealIdentity:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"others may read the key {path}: chmod 600 it, or delete it to get a new one")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{path} holds no key: {exc}") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} holds a key of another kind than Ed25519")
    return SealIdentity(key)


def fresh_identity() -> SealIdentity:
    """Make a key that is gone when the program ends."""
    return SealIdentity(Ed25519PrivateKey.generate())
