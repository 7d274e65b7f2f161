"""Compile the kernel (wasm and native) and the ggml device before the wheel is packed."""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


def _load(path: Path) -> ModuleType:
    """Import one build script by its path: the packages themselves need dependencies that a build lacks."""
    spec = importlib.util.spec_from_file_location(f"_build_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build_all() -> None:
    """Build everything that is not Python into `relay/_built` and `backbone/_built`."""
    _load(ROOT / "wasm" / "build.py").build_default()
    _load(ROOT / "wasm" / "pyodide" / "build.py").build_default()
    _load(ROOT / "backbone" / "engine" / "build.py").build_default()


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook: runs for wheels and for editable installs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        build_all()
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    build_all()
