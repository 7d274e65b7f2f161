"""
The metadata of a GGUF, read with its types checked. Any number may stand once, or once per layer.
"""

from typing import Any

from backbone.errors import ModelError
from backbone.model.gguf_file import GgufFile, shown

LARGEST = (1 << 31) - 1


class Keys:
    """
    Access by key. All raise ModelError, naming file and key, for what is missing or not what it must be.
    """

    __slots__ = ("_values", "file_name")

    def __init__(self, file: GgufFile) -> None:
        self._values = file.values
        self.file_name = file.path.name

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def number(self, key: str, *, default: int | None = None) -> int:
        """A count of the whole model."""
        return self._count(key, self._value(key, default))

    def number_of(self, key: str, layer: int, *, default: int | None = None) -> int:
        """A count of one layer."""
        value = self._value(key, default)
        if not isinstance(value, tuple):
            return self._count(key, value)
        if layer >= len(value):
            raise ModelError(f"{self.file_name}: {key} has {len(value)} values, none for layer {layer}")
        return self._count(key, value[layer])

    def largest(self, key: str) -> int:
        """The largest count of all layers; 0 when the key is missing."""
        value = self._value(key, 0)
        values = value if isinstance(value, tuple) else (value,)
        return max((self._count(key, entry) for entry in values), default=0)

    def _value(self, key: str, default: object) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"{self.file_name} lacks {key}")
        return value

    def _count(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
            raise self._wrong(key, value, "a count")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.file_name}: {key} is {shown(repr(value))}, not {wanted}")
