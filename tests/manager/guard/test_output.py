"""Lines of ranks: whole ones, prefixed; the last ones kept."""

from hypothesis import given
from hypothesis import strategies as st

from manager.guard.rules import MAX_LINE_BYTES, MAX_TAIL_CHARS, PIECE_BYTES, TAIL_LINES, Lines, Outlet


@given(st.lists(st.binary(max_size=20)))
def test_no_byte_is_lost(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)]
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    assert found + lines.end() == (expected[:-1] if expected[-1] == b"" else expected)


def test_a_line_that_does_not_end_is_cut() -> None:
    lines = Lines()
    assert lines.feed(b"x" * (2 * MAX_LINE_BYTES + 1)) == [b"x" * MAX_LINE_BYTES] * 2
    assert lines.end() == [b"x"]


def test_the_tail_is_the_last_lines_that_say_something() -> None:
    lines = Lines()
    lines.feed(b"".join(b"%d\n\n" % i for i in range(100)))
    assert lines.tail == [str(i) for i in range(100 - TAIL_LINES, 100)]


def test_the_tail_is_safe_to_show() -> None:
    lines = Lines()
    lines.feed(b"10%\r100%\n\x1b[31mred\n\xff\n" + b"y" * 1000 + b"\n")
    assert lines.tail == ["100%", "\N{REPLACEMENT CHARACTER}[31mred", "\N{REPLACEMENT CHARACTER}", "y" * MAX_TAIL_CHARS]


def test_while_it_is_written_a_line_without_an_end_counts() -> None:
    lines = Lines()
    lines.feed(b"".join(b"%d\n" % i for i in range(100)) + b"epoch 3:  10%\repoch 3:  20%\r")
    assert lines.so_far == [*(str(i) for i in range(101 - TAIL_LINES, 100)), "epoch 3:  20%"]
    assert lines.tail == [str(i) for i in range(100 - TAIL_LINES, 100)]
    lines.feed(b"done\n")
    assert lines.so_far == lines.tail
    assert lines.tail[-1] == "done"


@given(st.lists(st.binary(max_size=3000), max_size=20), st.integers(1, PIECE_BYTES))
def test_the_outlet_gives_all_in_order_and_in_pieces(lines: list[bytes], most: int) -> None:
    outlet, written = Outlet(), b""
    outlet.put("[a/0] ", lines)
    while piece := outlet.piece():
        assert len(piece) <= PIECE_BYTES
        written += piece[:most]
        outlet.taken(len(piece[:most]))
    assert written == b"".join(b"[a/0] " + line + b"\n" for line in lines)
    assert not outlet.has_some
    assert not outlet.is_full


def test_it_is_full_by_its_bytes() -> None:
    outlet = Outlet(limit_bytes=10)
    outlet.put("", [b"12345678"])
    assert not outlet.is_full
    outlet.put("", [b""])
    assert outlet.is_full
