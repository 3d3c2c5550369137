"""Where etcd is."""

import pytest

from lighthouse.store.etcd_client import parse_etcd_address
from lighthouse_protocol.refusals import InvalidRequest


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("etcd://a", "etcd://a:2379/lighthouse"),
        ("etcd://a,b:1,[::1]:2", "etcd://a:2379,b:1,[::1]:2/lighthouse"),
        ("etcd://a/", "etcd://a:2379/lighthouse"),
        ("etcd://a:1/x/y-z/", "etcd://a:1/x/y-z"),
        ("etcd://a:1,a:1", "etcd://a:1/lighthouse"),
    ],
)
def test_it_is_read(text: str, read: str) -> None:
    assert str(parse_etcd_address(text)) == read


@pytest.mark.parametrize(
    "text", ["a:1", "etcd://", "etcd://a,,b", "etcd://a:0", "etcd://a/ü", "etcd://a//b", "http://a"]
)
def test_another_text_is_refused_by_the_name_of_the_option(text: str) -> None:
    with pytest.raises(InvalidRequest, match="^--store: "):
        parse_etcd_address(text)
