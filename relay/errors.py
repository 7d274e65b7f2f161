"""
What can go wrong in the relay, and whose fault it is.

    RelayError
    ├── ConfigError            the operator: a setting is wrong or unknown; the message shows the value found
    ├── AuthError              the peer: wrong token or secret                            401, close 4401
    ├── SliceError             the caller of /slices
    │   ├── SliceUnknown       no connected backbone has it                               504
    │   ├── SliceTimeout       the backbone was asked and did not deliver in time         504
    │   ├── SliceCorrupt       the bytes are not what their name says                     422
    │   ├── SliceTooLarge      larger than the manifest says, or than the cache           413
    │   └── StorageFull        neither the disk of this relay nor its memory take it      507
    └── Overloaded             capacity: come back after .retry_after_s                   503, close 4429

Breaches of the wire protocol have their own tree in wire/errors.py. Facts are attributes, messages are built
from them; `code` is the word used in HTTP error bodies.
"""

from typing import ClassVar

from relay.wire.rebuild import Rebuildable


class RelayError(Rebuildable):
    """Root of the tree. `status` is the HTTP status where one is due."""

    code: ClassVar[str] = "relay"
    status: ClassVar[int] = 500


class ConfigError(RelayError):
    code = "config"


class AuthError(RelayError):
    code = "auth"
    status = 401


class SliceError(RelayError):
    """Root of what can go wrong with one slice."""

    code = "slice"


class SliceUnknown(SliceError):
    code = "slice_unknown"
    status = 504

    def __init__(self, slice_id: str) -> None:
        self.slice_id = slice_id
        super().__init__(f"slice {slice_id[:12]} is not cached and no connected backbone has it")


class SliceTimeout(SliceError):
    code = "slice_timeout"
    status = 504

    def __init__(self, slice_id: str, backbone: str, waited_s: float) -> None:
        self.slice_id = slice_id
        self.backbone = backbone
        self.waited_s = waited_s
        super().__init__(
            f"slice {slice_id[:12]} is not cached; backbone {backbone!r} was asked and did not deliver it "
            f"within {waited_s:g} s"
        )


class SliceCorrupt(SliceError):
    code = "slice_corrupt"
    status = 422

    def __init__(self, slice_id: str, found: str) -> None:
        self.slice_id = slice_id
        self.found = found
        super().__init__(f"slice {slice_id[:12]}: the bytes hash to {found[:12]}; nothing was stored")


class SliceTooLarge(SliceError):
    code = "slice_too_large"
    status = 413

    def __init__(self, slice_id: str, limit_bytes: int) -> None:
        self.slice_id = slice_id
        self.limit_bytes = limit_bytes
        super().__init__(f"slice {slice_id[:12]}: more than the {limit_bytes} bytes it may have")


class StorageFull(SliceError):
    code = "storage_full"
    status = 507

    def __init__(self, slice_id: str, why: str) -> None:
        self.slice_id = slice_id
        self.why = why
        super().__init__(f"slice {slice_id[:12]}: this relay cannot keep it, on disk or in memory: {why}")


class Overloaded(RelayError):
    code = "overloaded"
    status = 503

    def __init__(self, what: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}; come back after {retry_after_s:g} s")
