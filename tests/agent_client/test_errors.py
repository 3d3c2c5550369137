import pytest

from agent_client.errors import first_line

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [192.0.2.2]:10158"
ADVICE = ". This is typically caused by a remote worker hanging or bugs in the application. Check the logs."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GLOO, "Connection closed by peer [192.0.2.2]:10158"),
        (GLOO + ADVICE, "Connection closed by peer [192.0.2.2]:10158"),
        ("out of memory\nwith a traceback", "out of memory"),
        ("", "RuntimeError"),
        ("x" * 400, "x" * 300),
    ],
)
def test_an_error_is_one_line_without_what_libraries_put_around_it(text: str, line: str) -> None:
    assert first_line(RuntimeError(text)) == line
