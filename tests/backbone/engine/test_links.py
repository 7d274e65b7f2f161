"""A split model whose parts are links to files of other names, as caches of model hubs have them."""

from pathlib import Path

from backbone.engine.supervisor import Engine
from backbone.model.gguf import Model, open_model
from tests.backbone.engine.test_supervisor import complete, config, formulas
from tests.fakes.local_experts import LocalExperts
from tests.models.rewrite import rewrite


async def test_engine_opens_all_parts_through_their_links(small_model: Model, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    for folder in (blobs, snapshot):
        folder.mkdir()
    first = rewrite(small_model.path, blobs / "m.gguf", per_shard=20)
    for number, part in enumerate(sorted(blobs.iterdir())):
        (snapshot / part.name).symlink_to(part.rename(blobs / f"{number:064x}"))
    model = open_model(snapshot / first.name)
    assert len(model.files) > 1
    async with Engine(config(model.path), LocalExperts(model), formulas(model)) as engine:
        linked = await complete(engine, max_tokens=4)
    async with Engine(config(small_model.path), LocalExperts(small_model)) as engine:
        assert await complete(engine, max_tokens=4) == linked
