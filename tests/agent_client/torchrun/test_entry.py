"""torch finds the backend by its entry point, and makes handlers of it by its own registry."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerRegistry
from torch.distributed.elastic.rendezvous.registry import (
    _register_out_of_tree_handlers,  # pyright: ignore[reportPrivateUsage]
    get_rendezvous_handler,
)

from agent_client.torchrun.entry import create_handler, get_handler
from tests.agent_client.torchrun.nodes import entry_points


def params(**config: object) -> RendezvousParameters:
    return RendezvousParameters("lighthouse", "localhost:29510", "some-run", 3, 6, **config)


def test_torch_finds_it_out_of_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = RendezvousHandlerRegistry()
    monkeypatch.setattr(rendezvous.registry, "handler_registry", registry)
    monkeypatch.syspath_prepend(entry_points(tmp_path))
    _register_out_of_tree_handlers()
    handler = get_rendezvous_handler(params())
    assert (handler.get_backend(), handler.get_run_id()) == ("lighthouse", "some-run")


def test_it_may_be_registered_twice_and_no_other_by_its_name() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("lighthouse", get_handler())
    registry.register("lighthouse", get_handler())
    with pytest.raises(ValueError, match="is already registered"):
        registry.register("lighthouse", lambda _: create_handler(params()))


def test_it_serves_each_method_of_torch_s_interface() -> None:
    handler = create_handler(params())
    assert isinstance(handler, RendezvousHandler)
    own = set(vars(type(handler)))
    asked = {name for name in vars(RendezvousHandler) if not name.startswith("_")}
    assert asked <= own, asked - own


def test_nothing_is_asked_of_the_lighthouse_before_the_first_round() -> None:
    """Nothing listens at that port: torch makes a handler before it knows whether it is used."""
    handler = create_handler(params(connect_timeout=1))
    assert not handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    assert handler.shutdown()


def test_the_placeholder_of_jobs_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of all such jobs would meet."""
    for variable in ("LIGHTHOUSE_JOB", "LIGHTHOUSE_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    unnamed = RendezvousParameters("lighthouse", "localhost:29510", "none", 1, 1)
    with pytest.raises(ValueError, match="--rdzv-id is missing.* LIGHTHOUSE_RUN_ID or LIGHTHOUSE_JOB"):
        create_handler(unnamed)
    monkeypatch.setenv("LIGHTHOUSE_JOB", "mine")
    assert create_handler(unnamed).shutdown()
