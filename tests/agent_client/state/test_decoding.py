"""The encoding of a state: bit exact, its length known, and nothing but CorruptState for anything else."""

import ast
import enum
import io
import json
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64

from agent_client import healing, state
from agent_client.state.codec import (
    MAGIC,
    MAX_HEADER_BYTES,
    VERSION,
    TruncatedState,
    allocate,
    decode,
    encode,
    read_head,
)
from agent_client.state.tree import DTYPES, MAX_DEPTH, CorruptState
from agent_client.training import checkpoint_folder
from tests.agent_client.state.trees import encoded, resident_bytes, same, trees

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000abcdef"))[0]


def forged(header: object, payload: bytes = b"", version: int = VERSION, magic: bytes = MAGIC) -> bytes:
    """An encoding whose checksums are right, whatever its header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack(">8sIQ", magic, version, len(text))
    return prefix + xxh3_64(prefix + text).digest() + text + payload


def checksummed(blob: bytes) -> bytes:
    return blob + xxh3_64(blob).digest()


SMALL = {"w": torch.arange(3, dtype=torch.int16), "n": [1, 2.5, "ü", None], "b": b"\x00\xff", "e": torch.empty(0)}


def test_it_is_decoded_to_the_cpu_whatever_the_default_device() -> None:
    content = encoded(SMALL)
    with torch.device("meta"):
        decoded = decode(content)
    assert same(decoded, SMALL)


class TestRoundTrip:
    @settings(max_examples=300)
    @given(trees, st.integers(1, 40))
    @example([NAN_WITH_PAYLOAD, -0.0, float("inf"), "\ud800\udc00", {True: 1, NAN_WITH_PAYLOAD: 2}], 3)
    @example([OrderedDict(a=1), Counter("aab"), {1: "int", "1": "str", (1, "x"): "tuple"}], 3)
    def test_any_tree(self, state: Any, chunk_bytes: int) -> None:
        content = encoded(state, chunk_bytes)
        assert len(content) == encode(state).length
        assert same(decode(content), state)

    @pytest.mark.parametrize("number", [16**5000, -(16**5000), 2**63, -(2**63), 2**63 - 1], ids=hex)
    def test_an_int_of_any_size(self, number: int) -> None:
        assert decode(encoded({number: [number]})) == {number: [number]}, "differs"

    @pytest.mark.parametrize("name", sorted(DTYPES))
    def test_every_dtype(self, name: str) -> None:
        raw = torch.arange(2 * 3 * 16, dtype=torch.uint8)
        tensor = raw.view(DTYPES[name]).reshape(3, -1)
        assert same(decode(encoded(tensor)), tensor)

    def test_no_dtype_in_use_is_left_out(self) -> None:
        used = "bfloat16 float16 float8_e4m3fn float8_e5m2 bool complex64 uint16 int64 float64"
        assert set(used.split()) <= set(DTYPES)

    def test_lazy_views_are_resolved(self) -> None:
        tensor = torch.tensor([1 + 2j, 3 - 4j])
        views = [tensor.conj(), tensor.conj().imag, torch._neg_view(torch.tensor([1.0, 2.0]))]
        received = decode(encoded(views))
        assert [part.tolist() for part in received] == [[1 - 2j, 3 + 4j], [-2, 4], [-1, -2]]

    def test_parameters_become_plain_tensors(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        received = decode(encoded(parameter))
        assert (type(received), received.requires_grad, received.tolist()) == (torch.Tensor, False, [1, 1])

    def test_a_source_that_gives_a_byte_at_a_time(self) -> None:
        class Trickle(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                return super().read(min(1, size or 0))

        source = Trickle(encoded(SMALL))
        head = read_head(source)
        assert (head.length, head.size) == (encode(SMALL).length, source.tell())
        assert len(head.layouts) == 3

    def test_tensors_are_not_copied_to_send(self) -> None:
        tensor = torch.arange(100, dtype=torch.uint8)
        chunk = next(chunk for chunk in encode(tensor) if len(chunk) == 100)
        assert torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() == tensor.data_ptr()

    def test_chunks_keep_to_their_size(self) -> None:
        sizes = [len(chunk) for chunk in encode([torch.zeros(100, dtype=torch.uint8), bytes(70)], chunk_bytes=64)]
        assert sizes[1:] == [64, 36, 8, 64, 6, 8]


class Colour(enum.IntEnum):
    RED = 1


class Wrapped(torch.Tensor):
    pass


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
DEEP: Any = 1
for _ in range(MAX_DEPTH + 2):
    DEEP = (DEEP,)


class TestRefusalToSend:
    @pytest.mark.parametrize(
        ("value", "words"),
        [
            (print, "builtin_function_or_method"),
            (np.float64(1), r"numpy.float64.*\.item\(\)"),
            (np.bool_(1), r"numpy.*\.item\(\)"),
            (np.longdouble(1), r"numpy.longdouble.*\.item\(\)"),
            (np.str_("x"), r"numpy.str_.*\.item\(\)"),
            (np.array([print]), "numpy.ndarray.*from_numpy"),
            (np.zeros(2, ">f4" if np.dtype("<f4").isnative else "<f4"), "numpy.ndarray.*from_numpy"),
            (Colour.RED, "Colour.*plain"),
            (namedtuple("Pair", "a b")(1, 2), "Pair.*plain"),
            (torch.Size([1]), "torch.Size.*plain"),
            (defaultdict(list), "defaultdict.*plain"),
            ({1}, "set"),
            (bytearray(b"x"), "bytearray"),
            (torch.float32, "dtype"),
            (torch.zeros(2).to_sparse(), "to_dense"),
            (torch.zeros(2, device="meta"), "meta"),
            (torch.zeros(2).as_subclass(Wrapped), "Wrapped.*to_local"),
            (torch.zeros([1] * 65), "65 dimensions"),
            (torch.zeros(1, dtype=torch.uint8).view(torch.bits8), "bits8.*wider"),
            ({b"x": 1}, "has the key b'x', a bytes"),
            ({(1, frozenset()): 1}, "has the key.*tuple"),
            ({torch.zeros(1): 1}, "has the key.*Tensor"),
        ],
    )
    def test_names_the_path_the_type_and_what_to_do(self, value: Any, words: str) -> None:
        state = {"model": {"a": 1}, "optimizer": [0, {"hook": value}]}
        with pytest.raises(TypeError, match=rf"state\['optimizer'\]\[1\]\['hook'\].*{words}"):
            encode(state)

    @pytest.mark.parametrize("value", [ITSELF, DEEP])
    def test_too_deep(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"state\['x'\].*deeper than 64"):
            encode({"x": value})

    def test_as_deep_as_can_be(self) -> None:
        assert same(decode(encoded(DEEP[0])), DEEP[0])

    def test_a_header_that_no_peer_would_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agent_client.state.codec.MAX_HEADER_BYTES", 100)
        with pytest.raises(ValueError, match=r"header of .* bytes, more than 100: keep"):
            encode(list(range(100)))


class TestDamage:
    def test_every_truncation(self) -> None:
        content = encoded(SMALL)
        for end in range(len(content)):
            with pytest.raises(CorruptState):
                decode(content[:end])
        for end in range(len(encode(SMALL).head)):
            with pytest.raises(TruncatedState):
                read_head(io.BytesIO(content[:end]))

    def test_every_bit(self) -> None:
        content = bytearray(encoded(SMALL))
        for position in range(len(content) * 8):
            content[position // 8] ^= 1 << position % 8
            with pytest.raises(CorruptState):
                decode(bytes(content))
            content[position // 8] ^= 1 << position % 8
        assert same(decode(bytes(content)), SMALL)

    def test_more_than_its_header_describes(self) -> None:
        content = encoded(SMALL)
        with pytest.raises(CorruptState, match=f"{len(content)} bytes, but {len(content) + 1} were received"):
            decode(content + b"x")

    def test_a_tensor_that_changes_while_it_is_sent(self) -> None:
        tensor = torch.zeros(100, dtype=torch.uint8)
        content = b""
        for chunk in encode(tensor, chunk_bytes=10):
            tensor[5] = 1 if len(content) == 0 else tensor[5]
            content += bytes(chunk)
        assert decode(content)[5] == 1
        stream = iter(encode(tensor, chunk_bytes=100))
        head, chunk = next(stream), next(stream)
        tensor[5] = 2
        with pytest.raises(CorruptState, match="checksum of piece 0"):
            decode(b"".join([head, chunk, *stream]))


FLOATS = [["float32", [2]]]
HEADERS = st.recursive(
    st.sampled_from([None, True, 0, 1, -1, 1.5, "", "ff", "7ff0000000000000"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("iftdcobxynq"), inner, max_size=2),
    max_leaves=10,
)
SHAPES = st.lists(st.integers(-1, 2), max_size=3)
ENTRIES = st.tuples(st.sampled_from(["uint8", "int32", "qint8"]), SHAPES) | HEADERS
ENTRIES |= st.tuples(st.sampled_from(["uint8", "int16"]), SHAPES, SHAPES)


class TestForgery:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (forged({}, magic=b"PK\3\4    "), "not a state"),
            (forged({}, version=VERSION + 1), f"version {VERSION + 1}, this side reads {VERSION}"),
            (forged(b"{"), "not valid JSON"),
            (forged(b'{"tree": NaN, "tensors": []}'), "NaN is not JSON"),
            (forged(b'{"tree": 1' + b"0" * 5000 + b', "tensors": []}'), "not valid JSON"),
            (forged(b"[" * 100_000), "not valid JSON"),
            (forged(b'{"tree": ' + b"[" * 500 + b"]" * 500 + b', "tensors": []}'), "nested deeper"),
            (forged({"tree": 1, "tensors": {}}), "lacks"),
            (forged({"tree": {"a": 1, "b": 2}, "tensors": []}), "neither a value nor a container"),
            (forged({"tree": {"p": "os.system"}, "tensors": []}), "unknown or malformed element 'p'"),
            (forged({"tree": {"t": 1}, "tensors": []}), "malformed element 't'"),
            (forged({"tree": {"i": "zz"}, "tensors": []}), "not a number"),
            (forged({"tree": {"d": [[1, 2, 3]]}, "tensors": []}), "not a pair"),
            (forged({"tree": {"d": [[1, 2], [True, 3]]}, "tensors": []}), "key twice"),
            (forged({"tree": {"d": [[[1], 2]]}, "tensors": []}), "cannot be a key"),
            (forged({"tree": {"o": [[], 5]}, "tensors": []}), "metadata"),
            (forged({"tree": {"b": 0}, "tensors": []}), "tensor 0 twice, or has no such"),
            (forged({"tree": [{"b": 0}, {"b": 0}], "tensors": FLOATS}, checksummed(bytes(8))), "tensor 0 twice"),
            (forged({"tree": 1, "tensors": FLOATS}, checksummed(bytes(8))), "1 tensors belong nowhere"),
            (forged({"tree": {"b": 0}, "tensors": FLOATS}, bytes(16)), "checksum of piece 0"),
            (forged({"tree": {"b": 0}, "tensors": FLOATS}, checksummed(bytes(8))[:-1]), "were received"),
            (
                forged({"tree": {"y": 0}, "tensors": FLOATS}, checksummed(bytes(8))),
                "float32 of shape .* cannot be bytes",
            ),
            (forged({"tree": {"y": 0}, "tensors": [["uint8", [1, 1]]]}, checksummed(b"x")), "cannot be bytes"),
            (forged({"tree": 1, "tensors": [["float32", [-2]]]}), "not described"),
            (forged({"tree": 1, "tensors": [["float32", [1] * 65]]}), "not described"),
            (forged({"tree": {"b": 0}, "tensors": [["uint8", [2, 2], [2, 2]]]}), "strides that"),
            (forged({"tree": {"b": 0}, "tensors": [["uint8", [2, 2], [3, 1]]]}), "strides that"),
            (forged({"tree": {"b": 0}, "tensors": [["uint8", [2, 2], [1]]]}), "strides that"),
            (forged({"tree": {"b": 0}, "tensors": [["uint8", [2], [-1]]]}), "strides that"),
            (forged({"tree": {"b": 0}, "tensors": [["uint8", [2], [1], [1]]]}), "strides that"),
            (forged({"tree": {"n": ["float64", 0]}, "tensors": [["uint8", [0]]]}, checksummed(b"")), "cannot be an"),
            (forged({"tree": {"q": [[1, 2], 1]}, "tensors": []}), "malformed element 'q'"),
            (forged({"tree": 1, "tensors": [["qint8", [2]]]}), "no dtype 'qint8'"),
            (forged({"tree": 1, "tensors": [["bool", [2**62, 4, 0]]]}), "cannot have the shape"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_is_refused_with_its_reason(self, content: bytes, words: str) -> None:
        with pytest.raises(CorruptState, match=words):
            decode(content)

    @settings(max_examples=150)
    @given(st.data())
    def test_any_header_gives_a_state_or_corrupt_state(self, data: st.DataObject) -> None:
        header = {"tree": data.draw(HEADERS), "tensors": data.draw(st.lists(ENTRIES, max_size=3) | HEADERS)}
        content = forged(header, data.draw(st.sampled_from([b"", checksummed(bytes(4)), bytes(40)])))
        try:
            state = decode(content)
        except CorruptState:
            return
        assert same(decode(encoded(state)), state)

    @pytest.mark.parametrize("size", [2**30, 2**50, 2**62])
    @pytest.mark.parametrize("tag", ["b", "y"])
    def test_a_lying_size_allocates_nothing(self, size: int, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
        content = forged({"tree": {tag: 0}, "tensors": [["uint8", [size]]]}, bytes(100))
        before = resident_bytes()
        try:
            allocate(read_head(io.BytesIO(content)).layouts)
        except CorruptState as error:
            assert "cannot allocate" in str(error)
        assert resident_bytes() - before < 64 * 2**20
        monkeypatch.setattr("agent_client.state.codec.allocate", lambda *_: pytest.fail("allocated"))
        with pytest.raises(CorruptState, match=f"but {len(content)} were received"):
            decode(content)

    def test_a_lying_header_length(self) -> None:
        prefix = struct.pack(">8sIQI", MAGIC, VERSION, MAX_HEADER_BYTES, 0)
        tracemalloc.start()
        with pytest.raises(TruncatedState):
            read_head(io.BytesIO(prefix + bytes(100)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * 2**20
        with pytest.raises(CorruptState, match="more than"):
            decode(struct.pack(">8sIQI", MAGIC, VERSION, MAX_HEADER_BYTES + 1, 0))

    def test_nothing_that_could_run_a_peers_code_is_imported(self) -> None:
        imported: set[str] = set()
        # catch_up.py copies and saves this rank's own schedulers. It reads no bytes of a peer.
        paths = [
            path
            for wing in (state, healing)
            for path in Path(wing.__path__[0]).rglob("*.py")
            if path.name != "catch_up.py"
        ]
        for path in [*paths, Path(checkpoint_folder.__file__)]:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add(str(node.module))
                elif isinstance(node, ast.Attribute | ast.Name):
                    name = node.attr if isinstance(node, ast.Attribute) else node.id
                    if ast.unparse(node) != "self.save":
                        assert name not in {"load", "eval", "exec", "__import__", "import_module", "save"}, path
        assert "json" in imported
        assert not imported & {"pickle", "marshal", "shelve", "dill", "importlib", "copyreg", "copy"}
