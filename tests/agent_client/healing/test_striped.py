"""A state from several sources at once: it is that of one of them, whatever happens to the others."""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from agent_client.healing.fetch import Fetch
from agent_client.healing.server import StateServer
from agent_client.state.codec import Encoding, encode
from agent_client.state.snapshot import StateMismatch
from tests.agent_client.healing.sources import KEY, bytes_sent, serving, took
from tests.agent_client.state.trees import same

pytestmark = pytest.mark.usefixtures("no_threads_left")
MIB = 2**20


def state(step: int = 12, buffers: float = 0.0, size: int = 48 * MIB) -> dict[str, Any]:
    """`step` has as many digits as it likes: what a source holds does not begin at the same byte."""
    weights = torch.arange(size // 8, dtype=torch.int64).split(6 * MIB // 8)
    return {
        "weights": list(weights),
        "buffers": [torch.full((3,), buffers) for _ in range(20)],
        "none": torch.zeros(0),
        "step": step,
    }


STATE = state()


def servers(stack: ExitStack, *states: dict[str, Any], secret: str = "") -> dict[str, StateServer]:
    found = {name: stack.enter_context(serving()) for name, _ in zip("abcde", states, strict=False)}
    for server, held in zip(found.values(), states, strict=True):
        server.publish(KEY, held, secret)
    return found


def fetch(those: dict[str, StateServer] | dict[str, str], timeout_s: float = 60.0, **options: Any) -> Fetch:
    addresses = {name: it if isinstance(it, str) else it.address for name, it in those.items()}
    sources = {name: lambda address=address: address for name, address in addresses.items()}
    return Fetch(sources, KEY, timeout_s, **{"accept": lambda _: None} | options)


def shares(caplog: pytest.LogCaptureFixture) -> str:
    """What the log says of who gave how much; empty: one source gave all."""
    found = [record.getMessage() for record in caplog.records if " came from " in record.getMessage()]
    return found[0].partition(" came from ")[2] if found else ""


@pytest.fixture(autouse=True)
def _said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No source counts as slow, on however slow a machine."""
    monkeypatch.setattr("agent_client.healing.rules.stripes.SLOW_S", 60.0)


@pytest.mark.usefixtures("patient")
class TestSeveral:
    @pytest.mark.parametrize("secret", ["", "of the quorum"])
    def test_each_gives_a_part(self, stack: ExitStack, caplog: pytest.LogCaptureFixture, secret: str) -> None:
        it = fetch(servers(stack, STATE, STATE, STATE, secret=secret), secret=secret)
        assert same(it.run(), STATE)
        assert [part.split()[0] for part in shares(caplog).split(", ")] == ["a", "b", "c"]

    def test_a_small_state_comes_from_one(self, stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
        small = state(size=MIB)
        assert same(fetch(servers(stack, small, small)).run(), small)
        assert not shares(caplog)

    def test_what_each_source_has_for_itself_is_that_of_one(
        self, stack: ExitStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        those = servers(stack, STATE, state(step=10**6, buffers=1.0), state(step=10**12, buffers=2.0))
        assert same(fetch(those).run(), STATE)
        assert shares(caplog).count("MiB") == 3

    def test_progress_never_goes_back_and_ends_with_all(self, stack: ExitStack) -> None:
        told: list[tuple[str, int, int]] = []
        those = servers(stack, STATE, state(buffers=1.0))
        fetch(those, on_received=lambda *them: told.append(them)).run()
        total = encode(STATE).length
        assert {(source, length) for source, _, length in told} == {("a", total)}
        assert sorted(told) == told
        assert told[-1][1] == total

    def test_a_layout_that_does_not_fit_ends_it_before_a_tensor_comes(self, stack: ExitStack) -> None:
        def expect(announced: Any) -> None:
            raise StateMismatch("another model", "another model")

        told: list[int] = []
        those = servers(stack, STATE, STATE)
        with pytest.raises(StateMismatch, match="another model"):
            fetch(those, expect=expect, on_received=lambda source, received, total: told.append(received)).run()
        assert not told


class TestNotAllOfThem:
    def test_one_with_other_tensors_is_not_used_and_it_is_said(
        self, stack: ExitStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert same(fetch(servers(stack, STATE, state(size=42 * MIB), STATE)).run(), STATE)
        assert "b" not in shares(caplog)
        assert "from b, which is not available: it answered 412" in caplog.text

    def test_nothing_is_used_of_one_that_holds_another_state(
        self, stack: ExitStack, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = STATE | {"weights": [weight + 1 for weight in STATE["weights"]]}
        big, other = ({"more": it["weights"], **it} for it in (STATE, other))
        assert same(fetch(servers(stack, big, other)).run(), big)
        assert "b" not in shares(caplog) or "b 0 MiB" in shares(caplog)

    @pytest.mark.parametrize("bad", ["a", "b"])
    def test_one_that_sends_damaged_bytes_is_given_up(
        self, stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, bad: str
    ) -> None:
        those = servers(stack, STATE, STATE, STATE)
        damaged = those[bad]._held.encoding  # type: ignore[union-attr]

        def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[bytes]:
            for chunk in real(encoding, start, stop):
                yield bytes(len(chunk)) if encoding is damaged else chunk

        monkeypatch.setattr(Encoding, "stripe", stripe)
        assert same(fetch(those).run(), STATE)
        assert re.search(f"from {bad}, which .*the checksum of piece", caplog.text)

    @pytest.mark.parametrize("lost", ["a", "b"])
    def test_one_that_dies_half_way(
        self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
    ) -> None:
        """The lead, too: what is here by then stays."""
        those = servers(stack, *[state(step=10**number) for number in range(3)])
        dying = those[lost]._held.encoding  # type: ignore[union-attr]
        read: list[int] = []

        def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[bytes]:
            for chunk in real(encoding, start, stop):
                read.append(len(chunk))
                if encoding is dying and start > 0:
                    raise ConnectionResetError("cut by the test")
                yield chunk

        monkeypatch.setattr(Encoding, "stripe", stripe)
        received = fetch(those).run()
        assert same(received, state(step=received["step"]))
        assert "cut by the test" in caplog.text
        assert sum(read) < 2 * encode(STATE).length

    @pytest.mark.parametrize("stalled", ["a", "b"])
    def test_one_that_stalls_is_cut_off_long_before_its_silence_is_over(
        self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stalled: str
    ) -> None:
        those, let_go = servers(stack, STATE, STATE, STATE), threading.Event()
        stuck = those[stalled]._held.encoding  # type: ignore[union-attr]

        def stripe(encoding: Encoding, start: int, stop: int, real: Any = Encoding.stripe) -> Iterator[bytes]:
            for chunk in real(encoding, start, stop):
                if encoding is stuck:
                    let_go.wait(30)
                yield chunk

        monkeypatch.setattr(Encoding, "stripe", stripe)
        with took(0.5, 15):
            assert same(fetch(those, silence_s=18.0).run(), STATE)
        let_go.set()
        assert f"{stalled} is slow" in caplog.text

    def test_a_lead_that_dies_within_its_checksums(
        self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        those = servers(stack, state(step=1), state(step=22, buffers=1.0), state(step=333, buffers=1.0))
        dying = those["a"]._held.encoding  # type: ignore[union-attr]

        def checksums(encoding: Encoding, real: Any = Encoding.checksums) -> Iterator[bytes]:
            for number, checksum in enumerate(real(encoding)):
                if encoding is dying and number == 5:
                    raise ConnectionResetError("cut by the test")
                yield checksum

        monkeypatch.setattr(Encoding, "checksums", checksums)
        assert same(fetch(those).run(), state(step=22, buffers=1.0))
        assert "cannot receive the state of" in caplog.text

    def test_without_its_state_the_others_give_it(self, stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
        those = servers(stack, STATE, STATE, STATE)
        those["b"].withdraw()
        those["b"].refuse_up_to(*KEY[:2])
        assert same(fetch(those).run(), STATE)
        assert "b" not in shares(caplog)


class TestOwn:
    """A rank that may hold the same tensors itself."""

    def test_equal_tensors_are_not_transferred(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        sent, told = bytes_sent(monkeypatch), list[tuple[str, int, int]]()
        theirs = STATE | {"step": 10**9}
        it = fetch(servers(stack, theirs), own=STATE, on_received=lambda *them: told.append(them))
        assert same(it.run(), theirs)
        assert not sent
        assert told == [("a", encode(theirs).length, encode(theirs).length)]

    def test_what_is_received_does_not_share_memory_with_what_is_held(self, stack: ExitStack) -> None:
        received: Any = fetch(servers(stack, STATE), own=STATE).run()
        assert received["weights"][0].data_ptr() != STATE["weights"][0].data_ptr()

    def test_a_transposed_tensor_keeps_its_shape(self, stack: ExitStack) -> None:
        held = {"weight": torch.arange(6.0).reshape(2, 3).t()}
        assert same(fetch(servers(stack, held), own=held).run(), held)

    @pytest.mark.parametrize(
        "own",
        [
            state(size=42 * MIB),
            state(buffers=1.0),
            STATE | {"weights": [weight + 1 for weight in STATE["weights"]]},
        ],
        ids=["another_layout", "other_buffers", "other_weights"],
    )
    def test_if_a_tensor_differs_all_are_read(
        self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
    ) -> None:
        sent = bytes_sent(monkeypatch)
        assert same(fetch(servers(stack, STATE), own=own).run(), STATE)
        assert sum(sent) >= 48 * MIB
