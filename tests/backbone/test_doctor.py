"""`backbone doctor`: from facts to findings, and a look at a real relay."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest

from backbone import cli, doctor
from backbone.doctor import BackboneFacts, RelaySeen, check_backbone
from backbone.experts.native import NATIVE_BUILDS
from relay.doctor import Finding, Network, State
from relay.nat.candidates import NO_UDP, Behaviour, NatClass
from relay.server import RelayServer
from tests.relay.nat.test_endpoint import config

BEST = NATIVE_BUILDS[-1]
EASY = NatClass(True, True, Behaviour.ENDPOINT_INDEPENDENT, Behaviour.ADDRESS_AND_PORT_DEPENDENT, "192.0.2.2")
RELAY = RelaySeen("http://192.0.2.9:8765", "0.1.0", "", (3478, 3479), EASY, 0.4)
GOOD = BackboneFacts(
    Network(congestion="cubic", open_files=4096, free_bytes=8 << 30),
    kernel=f"native-{BEST}",
    kernels_built=NATIVE_BUILDS,
    modules={"xllamacpp": True, "aiolibdatachannel": True},
    relay=RELAY,
    model=("model.gguf", 10 << 30),
)


def of(found: list[Finding], what: str) -> Finding:
    (one,) = [each for each in found if each.what == what]
    return one


def test_good_machine_has_nothing_to_mend() -> None:
    found = check_backbone(GOOD)
    assert all(each.state is State.OK and not each.mend for each in found)
    assert of(found, "way to the relay").found.startswith("easy NAT")


@pytest.mark.parametrize(
    ("facts", "what", "state", "words"),
    [
        (replace(GOOD, kernel=None, kernel_fault="no library"), "expert kernel", State.BROKEN, "no library"),
        (replace(GOOD, kernel="native-scalar"), "expert kernel", State.SLOW, f"has no {BEST}"),
        (
            replace(GOOD, kernel="native-scalar", kernels_built=("scalar",)),
            "expert kernel",
            State.SLOW,
            f"{BEST} is not built",
        ),
        (replace(GOOD, device=False), "ggml device", State.BROKEN, "not compiled"),
        (replace(GOOD, modules={"xllamacpp": False}), "libraries", State.BROKEN, "xllamacpp"),
        (replace(GOOD, modules={"aiolibdatachannel": False}), "WebRTC", State.SLOW, "no punched paths"),
        (replace(GOOD, model=("m.gguf", None)), "model", State.BROKEN, "m.gguf is not there"),
        (replace(GOOD, model=("m.gguf", 100 << 30)), "model", State.SLOW, "107.4 GB, 8.6 GB"),
        (replace(GOOD, relay=RelaySeen("http://r:1", None, "refused")), "relay", State.BROKEN, "refused"),
        (replace(GOOD, relay=replace(RELAY, clock_off_s=90.0)), "clock", State.SLOW, "90 s behind"),
        (replace(GOOD, relay=replace(RELAY, clock_off_s=-90.0)), "clock", State.SLOW, "90 s ahead of"),
        (replace(GOOD, relay=replace(RELAY, stun_ports=())), "STUN", State.SLOW, "the relay has none"),
        (replace(GOOD, relay=replace(RELAY, nat=NO_UDP)), "way to the relay", State.SLOW, "UDP 3478"),
    ],
)
def test_what_slows_or_breaks_is_named_with_what_mends_it(
    facts: BackboneFacts, what: str, state: State, words: str
) -> None:
    found = check_backbone(facts)
    finding = of(found, what)
    assert finding.state is state and words in finding.found and finding.mend
    assert [each for each in found if each.state is not State.OK] == [finding], "and nothing else is"


def test_exit_status_says_broken() -> None:
    out = io.StringIO()
    assert doctor.run(None, None, out, lambda *_: GOOD) == 0
    assert doctor.run(None, None, out, lambda *_: replace(GOOD, device=False)) == 1
    assert "mend: make setup" in out.getvalue()


async def test_relay_that_runs_is_seen_with_its_stun_and_its_clock() -> None:
    settings = config()
    async with RelayServer(settings) as relay:
        seen = await asyncio.to_thread(doctor.see_relay, relay.url)
    assert seen.version and seen.stun_ports == (settings.stun_port, settings.stun_alt_port)
    assert seen.nat is not None and seen.nat.words == "no NAT"
    assert seen.clock_off_s is not None and abs(seen.clock_off_s) < doctor.CLOCK_TOLERANCE_S


def test_backbone_doctor_reads_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    gone = str(tmp_path / "no.gguf")
    assert cli.main(["doctor", "--relay", "http://127.0.0.1:1", "--model", gone]) == 1
    said = capsys.readouterr().out
    assert f"{gone} is not there" in said and "broken  relay" in said
    assert "passes its known answers" in said or "processor" in said
