"""docs/architecture.md names every file of the product, and no other."""

import re

from tests.docs.pages import REPOSITORY

FLOORS = ("protos", "lighthouse_protocol", "lighthouse_runtime", "lighthouse", "manager", "agent_client")
TEXT = (REPOSITORY / "docs" / "architecture.md").read_text()


def present() -> set[str]:
    files = {path for floor in FLOORS for path in (REPOSITORY / floor).rglob("*") if path.suffix in (".py", ".proto")}
    names = {path.relative_to(REPOSITORY).as_posix() for path in files}
    return {name for name in names if not re.search(r"_pb2(_grpc)?\.py$|/__init__\.py$", name)}


def test_every_file_has_its_line() -> None:
    listed = set(re.findall(rf"^\| `((?:{'|'.join(FLOORS)})/[\w/]+\.(?:py|proto))` \|", TEXT, re.MULTILINE))
    assert listed == present()
