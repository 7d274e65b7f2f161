"""Write a GGUF again with its tensors in another order, or split: as files come that people download."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter


def rewrite(
    source: Path,
    target: Path,
    order: Callable[[str], int] = lambda _: 0,
    per_shard: int = 0,
    keys_only_first: bool = False,
) -> Path:
    """
    Write `source` anew and return the file to open, the first shard of a split one.

    order: tensors are sorted by what it says of their names, else as they are. per_shard: tensors in each
    shard; 0: one file. keys_only_first: the first shard holds no tensor, as the converter makes it.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(
        target,
        reader.fields["general.architecture"].contents(),
        split_max_tensors=per_shard,
        small_first_shard=keys_only_first,
    )
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        of = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=of)
    for tensor in sorted(reader.tensors, key=lambda tensor: order(tensor.name)):
        writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target if per_shard == 0 else min(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))
