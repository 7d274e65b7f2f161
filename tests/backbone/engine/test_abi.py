"""The device works with the library it knows, and with no other."""

import subprocess
import sys

from backbone.engine.supervisor import PACKAGE_ROOT

# Opens the device after the CPU backend's own structs were made to say another API version.
PROGRAM = """
import ctypes, sys
from backbone.engine.device import Device
from backbone.engine.supervisor import device_library
from backbone.errors import EngineError
from backbone.gate.llama_api import library_path

library = ctypes.CDLL(str(library_path()))
library.ggml_backend_reg_by_name.restype = ctypes.c_void_p
version = ctypes.c_int.from_address(library.ggml_backend_reg_by_name(b"CPU"))
if len(sys.argv) > 1:
    version.value = int(sys.argv[1])
try:
    Device(device_library(), library_path(), "/nowhere/link", 1.0)
except EngineError as exc:
    print(exc)
"""


def refusal(*arguments: str) -> str:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_pinned_library_passes_the_self_test() -> None:
    """What remains to fail is the socket, which is opened last."""
    assert "does not listen on /nowhere/link" in refusal()


def test_unknown_api_version_is_refused_with_what_to_do() -> None:
    text = refusal("99")
    assert "API version 99 is unknown" in text
    assert "install the pinned xllamacpp" in text


def test_structs_of_another_version_are_noticed_before_anything_is_called() -> None:
    """A library that says 2 and looks like 3."""
    assert "differ from the known layout" in refusal("2")
