"""What has to be written down twice is the same in both places."""

import importlib.util
import re
from ctypes import Structure

import pytest

from backbone.experts import abi, native, reference
from backbone.model.formula import ACTIVATIONS, FORMATS, WEIGHT_POSITIONS
from tests.wasm.calls import ROOT
from tests.wasm.known_answers import TYPES

HEADER = (ROOT / "wasm" / "expert.h").read_text()
CONTRACT = (ROOT / "wasm" / "CONTRACT.md").read_text()
KERNELS_JS = ROOT / "node-web" / "src" / "kernels"
WASM_JS = (KERNELS_JS / "wasm.js").read_text()
REFUSALS_JS = (KERNELS_JS / "refusals.js").read_text()


def struct_fields(name: str) -> list[str]:
    body = re.search(rf"typedef struct {{([^}}]*)}} {name};", HEADER)
    assert body is not None
    code = re.sub(r"//.*", "", body[1])
    return re.findall(r"(\w+)(?=\s*[,;])", code)


def test_the_call_has_the_words_of_the_header() -> None:
    assert tuple(struct_fields("ExpertCall")) == abi.CALL_WORDS
    assert f"CALL_WORDS = {len(abi.CALL_WORDS)};" in WASM_JS


def test_the_formula_has_the_fields_of_the_header() -> None:
    fields = struct_fields("ExpertFormula")
    assert fields == [field[0] for field in abi.CFormula._fields_]
    assert f"FORMULA_BYTES = {4 * len(fields)};" in WASM_JS


@pytest.mark.parametrize(("name", "mirror"), [("ExpertRows", abi.CRows), ("ExpertPiece", abi.CPiece)])
def test_the_small_structures_are_those_of_the_header(name: str, mirror: type[Structure]) -> None:
    assert struct_fields(name) == [field[0] for field in mirror._fields_]


def test_constants_are_those_of_the_header() -> None:
    for name, value in (("SPLIT", native.SPLIT), ("MAX_SELF_TESTS", abi.MAX_SELF_TESTS)):
        assert f"EXPERT_{name} = {value} }};" in HEADER
    assert f"MAX_SELF_TESTS = {abi.MAX_SELF_TESTS};" in WASM_JS
    assert f"SPLIT_ROWS = {native.SPLIT};" in (KERNELS_JS / "pool.js").read_text()


@pytest.mark.parametrize(
    ("name", "words"), [("expert_activation", ACTIVATIONS), ("expert_weight_position", WEIGHT_POSITIONS)]
)
def test_numbers_of_words_are_those_of_the_header(name: str, words: tuple[str, ...]) -> None:
    body = re.search(rf"enum {name} {{(.*?)}};", HEADER, re.S)
    assert body is not None
    in_c = [word.lower() for word in re.findall(r"EXPERT_(?:WEIGHT_)?(\w+)", body[1])]
    assert sorted(in_c) == sorted(words)
    numbers = abi.ACTIVATION_NUMBERS if name == "expert_activation" else abi.WEIGHT_POSITION_NUMBERS
    assert numbers == {word: in_c.index(word) for word in words}
    assert str(in_c) in WASM_JS


def test_every_error_of_the_header_has_words_in_python_and_js() -> None:
    codes = {int(code) for code in re.findall(r"EXPERT_\w+\s*=\s*(-\d+),", HEADER)}
    assert codes == set(abi.MEANINGS)
    assert codes == {int(code) for code in re.findall(r"\[(-\d+)\]: \[", REFUSALS_JS)}


def test_versions_agree() -> None:
    version = re.search(r"EXPERT_ABI_VERSION = (\d+)", HEADER)
    assert version is not None
    assert int(version[1]) == abi.ABI_VERSION
    assert f"ABI_VERSION = {version[1]};" in WASM_JS


def test_every_constant_of_exp_and_gelu_is_the_same_in_c_numpy_and_contract() -> None:
    hexadecimal = r"-?0x[0-9a-f.]+p[+-]?\d+"
    code = (ROOT / "wasm" / "hidden.c").read_text()
    in_c = code[code.index("float exp_parts") : code.index("float relu")]
    constants = {float.fromhex(text) for text in re.findall(hexadecimal, in_c)} - {1.5 * 2.0**23}
    section = CONTRACT[CONTRACT.index("v = g *") : CONTRACT.index("exp(x) = (")]
    assert {float.fromhex(text) for text in re.findall(hexadecimal, section)} == constants
    python = (ROOT / "backbone" / "experts" / "reference.py").read_text()
    body = python[python.index("def exp_parts(") : python.index("def relu(")]
    assert {float.fromhex(text) for text in re.findall(hexadecimal, body)} == constants


@pytest.mark.parametrize("ggml_type", FORMATS)
def test_formats_have_one_layout(ggml_type: int) -> None:
    layout = FORMATS[ggml_type]
    name = layout.name.lower()
    source = (ROOT / "wasm" / "formats" / f"{name}.c").read_text()
    names = dict(re.findall(r"(COLS|BYTES) = (\d+)", source))
    entry = re.search(rf"expert_{name} = {{\s*(\w+),\s*(\w+),\s*(\w+),", source)
    assert entry is not None
    found = [int(names.get(word, word)) for word in entry.groups()]
    assert found == [ggml_type, layout.block, layout.block_bytes]
    assert f"({ggml_type})" in CONTRACT
    assert ggml_type in (*reference.FLOATS, *reference.UNPACK, reference.NVFP4)


def test_the_known_answers_cover_every_format() -> None:
    assert set(TYPES) == set(FORMATS)


def test_the_grids_are_those_of_the_gguf_package() -> None:
    spec = importlib.util.spec_from_file_location("wasm_grids", ROOT / "wasm" / "grids.py")
    assert spec is not None and spec.loader is not None
    grids = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grids)
    assert grids.HEADER.read_text() == grids.text(), "python wasm/grids.py"
