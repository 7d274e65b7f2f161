"""
What can go wrong in the backbone, and whose fault it is.

    BackboneError
    ├── ConfigError                a setting: correct it
    ├── RelayRefused               the relay does not take us: another token, another version of the protocol
    ├── ModelError                 the GGUF, or the cache it lives in: choose another model or mend the file
    │   └── FormulaUnsupported     the model is sound, this version cannot compute its experts
    ├── EngineError                llama.cpp's process: restarted by its supervisor
    │   ├── EngineRefused          the device met an operation on expert weights that it does not know
    │   └── EngineDown             no engine right now; the message says why the last one ended
    ├── LinkError                  bytes between device and dispatcher that break the format (link.py)
    └── SwarmError                 one call of the experts failed; its text travels to the log of the engine
        └── LayerFailed            no holder could compute it, not even this machine; names layer and holders

Facts are attributes; the message is built from them. `code` is the word used in HTTP error bodies and logs.
"""

from relay.wire.rebuild import Rebuildable


class BackboneError(Rebuildable):
    """Root of the tree."""

    code = "backbone"


class ConfigError(BackboneError):
    """A setting is unknown or impossible; named."""

    code = "config"


class RelayRefused(BackboneError):
    """The relay will not take this backbone as it is; trying again changes nothing."""

    code = "relay_refused"


class ModelError(BackboneError):
    code = "model"


class FormulaUnsupported(ModelError):
    """The model's experts need something this version does not compute yet."""

    code = "formula_unsupported"

    def __init__(self, what: str, layer: int | None = None) -> None:
        self.what = what
        self.layer = layer
        where = "" if layer is None else f" (layer {layer})"
        super().__init__(f"formula not supported yet: {what}{where}")


class EngineError(BackboneError):
    code = "engine"


class EngineRefused(EngineError):
    """The device found expert weights used in a way it does not know; the model is not served."""

    code = "engine_refused"

    def __init__(self, op: str, layer: int, tensor: str, why: str, file: str = "this model") -> None:
        self.op = op
        self.layer = layer
        self.tensor = tensor
        self.why = why
        super().__init__(f"the engine refuses {file}: {why} (op {op}, layer {layer}, tensor {tensor})")


class EngineDown(EngineError):
    """There is no engine to ask at the moment."""

    code = "engine_down"


class LinkError(BackboneError):
    code = "link"


class SwarmError(BackboneError):
    """A call of the experts could not be answered."""

    code = "swarm"


class LayerFailed(SwarmError):
    """Every holder of some expert failed, the local kernel included."""

    code = "layer_failed"

    def __init__(self, layer: int, why: str) -> None:
        self.layer = layer
        self.why = why
        super().__init__(f"layer {layer}: {why}")
