from pathlib import Path

import pytest

from backbone.engine import build


def test_device_is_compiled_once_and_again_when_the_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compiler() -> list[str]:
        calls.append(1)
        # stands for the compiler: writes the file named after -o
        return ["sh", "-c", 'while [ "$1" != -o ]; do shift; done; echo built > "$2"', "cc"]

    monkeypatch.setattr(build, "_compiler", compiler)
    library = build.build(tmp_path)
    first = library.stat().st_mtime_ns
    assert build.build(tmp_path).stat().st_mtime_ns == first
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.build(tmp_path).stat().st_mtime_ns != first
    assert sorted(path.name for path in tmp_path.iterdir()) == [build.LIBRARY, f"{build.LIBRARY}.stamp"]


def test_compiler_s_words_are_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compiler", lambda: ["sh", "-c", "echo no such header >&2; exit 1"])
    with pytest.raises(build.BuildError, match="no such header"):
        build.build(tmp_path)
    assert not (tmp_path / build.LIBRARY).exists()


def test_every_source_is_compiled() -> None:
    assert {path.name for path in build.HERE.glob("*.c")} == set(build.SOURCES)
    assert {path.name for path in build.HERE.glob("*.h")} == set(build.HEADERS)
