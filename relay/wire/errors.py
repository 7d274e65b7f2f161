"""
Say whose fault it is when bytes or calls do not fit the protocol.

    WireError
    ├── LocalProtocolError        we broke the rules: a bug here; never caught to continue
    └── RemoteProtocolError       the peer did: close with .close_code, do not retry unchanged
        ├── FrameTooLarge         4413
        ├── VersionMismatch       4426
        └── SealFault             a frame or key beyond the relay that is not what its peer sealed or signed;
                                  fails one call, ends no session
"""

from typing import ClassVar

from relay.wire.close import CloseCode
from relay.wire.rebuild import Rebuildable


class WireError(Rebuildable):
    """Any breach of the wire protocol."""

    code: ClassVar[str] = "wire"


class LocalProtocolError(WireError):
    """We tried to say or encode something the protocol does not allow."""

    code = "local_protocol"


class RemoteProtocolError(WireError):
    """The peer sent something the protocol does not allow."""

    code = "remote_protocol"
    close_code: ClassVar[CloseCode] = CloseCode.PROTOCOL


class FrameTooLarge(RemoteProtocolError):
    """A frame is longer than its type may be."""

    code = "frame_too_large"
    close_code = CloseCode.TOO_LARGE

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"{what}: {size_bytes} bytes, at most {limit_bytes} are allowed")


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another version of the protocol."""

    code = "version_mismatch"
    close_code = CloseCode.VERSION

    def __init__(self, found: int, supported: int) -> None:
        self.found = found
        self.supported = supported
        super().__init__(f"protocol version {found}, this side speaks {supported}")


class SealFault(RemoteProtocolError):
    """
    A sealed frame does not open, came twice, or came unsealed; or a key is not signed as it must be.

    Whose fault: the relay between the two ends, or the peer; the bytes do not tell which. `why` is one of
    `altered`, `repeated`, `unsealed`, `no_key`, `unsigned`, `other_identity`.
    """

    code = "bad_seal"

    def __init__(self, why: str, message: str) -> None:
        self.why = why
        super().__init__(message)
