"""HTTP server for live state: a source publishes one snapshot under a key, and a target fetches exactly that snapshot.

    GET /challenge
    200  Lighthouse-Nonce: a nonce, valid for the next request on this connection
    GET /manifest/{quorum_id}/{step}/{group_rank}?wait_s=...
         Lighthouse-Nonce: a nonce of the target; Lighthouse-Proof: proves that the target knows the quorum's secret
    200  the head of the encoding and the checksum of each piece, which define the state
         Lighthouse-Proof: proves that the source knows the secret, too
    GET /pieces/{layout}/{start}-{stop},.../{quorum_id}/{step}/{group_rank}?wait_s=...
    200  these bytes of the encoding, counted from the end of the head. `layout` is a digest of the tensors' dtypes and
         shapes, and is equal for states whose pieces have the same positions
    409  another key or none is on offer: JSON {"asked": key, "held": key or null}. Sent after up to `wait_s`, because a
         target may ask before the source has its snapshot, or at once if the source will never offer the state
    410  the state contains something that cannot be sent, named in the text; with the source's Lighthouse-Proof
    403  the target has not proved that it is a member of the quorum
    412  the state under this key has another layout
    503  too many connections

Each side proves its membership in the quorum before a byte of the state is sent or used, so strangers can neither read
nor provide weights. A proof covers the address that the target has called, and is valid for one request on one
connection, so copying or relaying it is useless. The state itself is not encrypted and needs the same trusted network
as the gradients.
"""

import itertools
import json
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

from agent_client.state.codec import CHECKSUM_BYTES, CHUNK_BYTES, Encoding, encode
from agent_client.state.tree import State
from agent_client.transfer.connection import CANNOT_BE_SENT, NONCE_HEADER, PROOF_HEADER, Pace, host_in_url
from agent_client.transfer.listener import Listener
from agent_client.transfer.offers import (
    CannotBeSentError,
    NotHeldError,
    StateKey,
    StateOffer,
    StateOffers,
    StrangerError,
)
from lighthouse_protocol.rules.access import SOURCE_WORD, TARGET_WORD, is_proven, prove

logger = logging.getLogger(__name__)

_ROUTE = re.compile(
    r"/(?:manifest|pieces/(?P<layout>[0-9a-f]{32})/(?P<ranges>[0-9,-]{1,10000}))"
    r"/(?P<quorum_id>[0-9]{1,20})/(?P<step>[0-9]{1,20})/(?P<group_rank>[0-9]{1,20})"
    r"(?:\?wait_s=(?P<wait_s>[0-9]{1,9}(?:\.[0-9]+)?))?"
)
HEADERS_TIMEOUT_S = 5.0
_STRIPE = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")


class StateServer:
    """Serves the current state and copies of earlier ones, in separate threads. A forked child closes its sockets."""

    def __init__(
        self,
        bind_host: str = "",
        *,
        advertise: str,
        port: int = 0,
        stall_timeout_s: float = 30.0,
        max_wait_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Start to listen.

        Args:
            bind_host: Address to listen on, or empty for all.
            advertise: Host name or IP address at which peers reach this host.
            port: TCP port, or 0 for a free one.
            stall_timeout_s: Maximum time that a reader may take for one chunk.
            max_wait_s: Maximum time that a request may wait for its key.
            chunk_bytes: Size of a chunk.
        """
        self._offers = StateOffers()
        self._chunk_bytes = chunk_bytes
        handler = partial(_Handler, self._offers, lambda: self.address, stall_timeout_s, max_wait_s)
        self._listener = Listener(bind_host, port, handler, self._offers.wake)
        self.address = f"http://{host_in_url(advertise)}:{self._listener.server_address[1]}"

    def publish(self, key: tuple[int, int, int], state: State, secret: str = "") -> None:
        """Offer `state` as the current one. Withdraws the state before it.

        Args:
            key: quorum_id, step, group_rank.
            state: Must not change before `withdraw`. It is not copied.
            secret: Readers must prove that they know it. If empty, any client can read the state.

        Raises:
            TypeError, ValueError: The state cannot be sent. The offer is unchanged.
        """
        encoding = encode(state, chunk_bytes=self._chunk_bytes)
        self._offers.put(StateKey(*key), encoding, secret)

    def keep(self, key: tuple[int, int, int], state: State, reads: int, secret: str = "") -> None:
        """Offer a copy in addition, until it was read `reads` times, or until `forget`. It must not change."""
        self._offers.keep(StateKey(*key), encode(state, chunk_bytes=self._chunk_bytes), reads, secret)

    def forget(self, key: tuple[int, int, int]) -> None:
        """Withdraw a copy and end its readers."""
        self._offers.forget(StateKey(*key))

    def refuse(self, key: tuple[int, int, int], reason: str, secret: str = "") -> None:
        """Answer requests for this state with the reason why it cannot be sent. Call `settle`, too."""
        self._offers.refuse(StateKey(*key), reason, secret)

    def settle(self, quorum_id: int, step: int) -> None:
        """Refuse requests up to that quorum and step at once if their state is not on offer."""
        self._offers.settle(quorum_id, step)

    def withdraw(self, grace_s: float = 0.0) -> None:
        """Withdraw the current state. Its readers may finish within `grace_s`, then their connections end.

        When this returns, no thread reads the state, so it may change again.

        Raises:
            TimeoutError: A reader does not end.
        """
        self._offers.clear(grace_s)

    def cut_off(self) -> None:
        """End the readers of the current state without waiting, even while `withdraw` waits. Safe in any thread."""
        self._offers.cut_off()

    def close(self) -> None:
        """End all connections, threads and the socket. Safe to repeat."""
        self._offers.close()
        self._listener.close()


class _Handler(BaseHTTPRequestHandler):
    server_version = "lighthouse-checkpoint"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(
        self,
        offers: StateOffers,
        address: Callable[[], str],
        stall_timeout_s: float,
        max_wait_s: float,
        *request: Any,
    ) -> None:
        self._offers = offers
        self._address = address
        self._max_wait_s = max_wait_s
        self._stall_timeout_s = stall_timeout_s
        self._nonce = ""
        super().__init__(*request)

    def handle_one_request(self) -> None:
        # The limit covers the whole request, so a client cannot hold the connection by sending slowly.
        self.connection.begin(min(HEADERS_TIMEOUT_S, self._stall_timeout_s))
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.connection.begin(math.inf, self._stall_timeout_s)
        return is_whole

    def do_GET(self) -> None:
        if self.path == "/challenge":
            self._nonce = secrets.token_hex(16)
            return self._start(200, {NONCE_HEADER: self._nonce, "Content-Length": 0})
        nonce, self._nonce = self._nonce, ""
        if (match := _ROUTE.fullmatch(self.path)) is None:
            return self.send_error(404)
        key = StateKey(*(int(match[name]) for name in StateKey._fields))
        wait_s = min(float(match["wait_s"] or 0), self._max_wait_s)
        nonces, proof = (nonce, self.headers.get(NONCE_HEADER, "")), self.headers.get(PROOF_HEADER, "")

        def is_member(secret: str) -> bool:
            return all(nonces) and is_proven(proof, secret, TARGET_WORD, self._address(), *key, *nonces)

        try:
            with self._offers.reading(key, wait_s, self.connection, is_member) as held:
                self._answer(held, nonces, match)
        except NotHeldError as error:
            self._refuse(409, key, error.held)
        except CannotBeSentError as error:
            proof = prove(error.secret, SOURCE_WORD, self._address(), *key, *nonces) if error.secret else ""
            self._answer_text(CANNOT_BE_SENT, str(error), {PROOF_HEADER: proof} if proof else {})
        except StrangerError:
            logger.warning("refused %s the state of %s: it is not a member of that quorum", self.client_address[0], key)
            self._refuse(403, key, None)
        return None

    def _answer(self, held: StateOffer, nonces: tuple[str, str], asked: re.Match[str]) -> None:
        self.connection.is_proven = True
        proof = prove(held.secret, SOURCE_WORD, self._address(), *held.key, *nonces)
        headers = {PROOF_HEADER: proof} if proof else {}
        if asked["layout"]:
            self._send_pieces(held, headers, asked["layout"], asked["ranges"])
        else:
            self._send_manifest(held, held.encoding, headers)

    def _send_manifest(self, held: StateOffer, encoding: Encoding, headers: dict[str, Any]) -> None:
        self._start(200, {"Content-Length": len(encoding.head) + encoding.pieces * CHECKSUM_BYTES, **headers})
        self._write(held, itertools.chain([encoding.head], encoding.checksums()))

    def _send_pieces(self, held: StateOffer, headers: dict[str, Any], layout: str, ranges: str) -> None:
        encoding = held.encoding
        found = [_STRIPE.fullmatch(part) for part in ranges.split(",")]
        stripes = [(int(part[1]), int(part[2])) for part in found if part is not None]
        end = encoding.body_length
        if layout != encoding.layout or None in found or not all(first < last <= end for first, last in stripes):
            return self._refuse(412, held.key, held.key)
        length = sum(last - first for first, last in stripes)
        self._start(200, {"Content-Type": "application/octet-stream", "Content-Length": length, **headers})
        self._write(held, (chunk for first, last in stripes for chunk in encoding.stripe(first, last)))
        self._offers.was_read(held, length)
        logger.debug("sent %d bytes of the state of %s to %s", length, held.key, self.client_address)
        return None

    def _write(self, held: StateOffer, chunks: Iterable[bytes | memoryview]) -> None:
        pace = Pace() if held.unread is not None else None  # no group waits for the reader of a copy
        for chunk in chunks:
            self.wfile.write(chunk)
            if pace is not None:
                pace.rest()

    def _refuse(self, status: int, asked: StateKey, held: StateKey | None) -> None:
        told = {"asked": asked._asdict(), "held": held and held._asdict()}
        self._answer_text(status, json.dumps(told), {"Content-Type": "application/json"})

    def _answer_text(self, status: int, text: str, headers: dict[str, Any]) -> None:
        body = text.encode()
        self._start(status, {"Content-Length": len(body), **headers})
        self.wfile.write(body)

    def _start(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: " + format, self.client_address, *args)
