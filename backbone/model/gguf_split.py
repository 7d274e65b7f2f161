"""
Find the files of a split model, and check that they are its files.

They are called `NAME-00001-of-00003.gguf` and so on, and stand beside each other. A name may be a link to a
file that is called otherwise (caches of model hubs link to `blobs/SHA-256`), so links are never followed
before siblings are looked for; llama.cpp finds them in the same way.
"""

import re
from pathlib import Path

from backbone.errors import ModelError
from backbone.model.gguf_file import GgufFile, read_gguf
from backbone.model.gguf_keys import Keys

SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL | re.ASCII)


def open_parts(path: Path) -> list[GgufFile]:
    """
    Open all files of the model of which `path` is one, in their order.

    Raises:
        ModelError: one is missing, damaged, or not the part that its name says.
    """
    match = SPLIT_NAME.match(path.name)
    if match is None:
        file = read_gguf(path)
        count = Keys(file).number("split.count", default=0)
        if count > 1:
            names = f"NAME-00001-of-{count:05d}.gguf"
            raise ModelError(
                f"{path.name} is one of {count} parts, but is not called so: give them {names} …"
            )
        return [file]
    count = int(match["count"])
    files: list[GgufFile] = []
    for number in range(1, count + 1):
        name = f"{match['stem']}-{number:05d}-of-{count:05d}.gguf"
        files.append(_part(path.with_name(name), number, count, path.name))
    if not files:
        raise ModelError(f"{path.name}: a model of no parts")
    return files


def _part(path: Path, number: int, count: int, asked_for: str) -> GgufFile:
    if not path.exists():
        raise ModelError(f"{asked_for} is one of {count} parts, and {path.name} is missing beside it")
    file = read_gguf(path)
    keys = Keys(file)
    said = keys.number("split.no", default=number - 1) + 1, keys.number("split.count", default=count)
    if said != (number, count):
        raise ModelError(f"{path.name} says that it is part {said[0]} of {said[1]}")
    return file
