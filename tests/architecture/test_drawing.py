"""docs/house.svg shows the house as it is."""

from tests.architecture.drawing import PICTURE, picture


def test_the_picture_is_that_of_the_code() -> None:
    assert PICTURE.read_text() == picture(), "python -m tests.architecture.drawing draws it anew"
