"""The device hands back the pages of a mapped model file, and touches no other memory."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from backbone.engine.link_server import LinkServer
from backbone.engine.supervisor import PACKAGE_ROOT
from tests.backbone.engine import pages


async def _unasked(_call: Any) -> Any:
    raise AssertionError("nothing is computed here")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the advice is harmless, and cannot be seen")
async def test_only_pages_of_a_shared_file_are_handed_back_and_none_loses_a_byte(tmp_path: Path) -> None:
    link = LinkServer(_unasked)
    await link.open()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.backbone.engine.pages", link.path, str(tmp_path),
            cwd=PACKAGE_ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
    finally:
        await link.close()
    assert process.returncode == 0, stderr.decode()
    report = json.loads(stdout)
    assert all(entry["unchanged"] for entry in report.values()), report
    handed_back = {kind: (entry["released"], entry["resident"]) for kind, entry in report.items()}
    assert handed_back == {
        "a file, shared": (pages.BYTES, 0),
        "a file, shared and written to": (pages.BYTES, 0),
        "a file, private and written to": (0, pages.BYTES),
        "anonymous": (0, pages.BYTES),
    }
