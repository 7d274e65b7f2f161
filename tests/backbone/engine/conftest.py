from pathlib import Path

import pytest

from backbone.model.gguf import Model, open_model
from backbone.model.random_model import make_random_moe


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random MoE with a shared expert: loads in half a second."""
    path: Path = make_random_moe(tmp_path_factory.mktemp("model") / "small.gguf")
    return open_model(path)
