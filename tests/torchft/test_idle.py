"""torchft's clients ping every 60 s also while idle; grpcio's defaults end them after 240 s ("too_many_pings")."""

import time

import pytest

from tests.processes import Lighthouse, Manager
from tests.torchft.stock import StockTorchft

IDLE_S = 300


@pytest.mark.slow
@pytest.mark.timeout(IDLE_S + 120)
def test_torchfts_clients_live_through_five_idle_minutes(stock: StockTorchft) -> None:
    with Lighthouse() as lighthouse, Manager(lighthouse.address, "a", "--job", "other", ranks=2) as manager:
        client = stock.lighthouse_client(lighthouse.address)
        rank = stock.manager_client(manager.address)
        before = client.join("x").result(30)
        waiting = rank.ask(0, 0, timeout=IDLE_S + 60)
        ends_at = time.monotonic() + IDLE_S
        while time.monotonic() < ends_at:
            assert not waiting.done(), waiting.result()
            time.sleep(1.0)
        assert client.join("x", step=1).result(30)["quorum_id"] > before["quorum_id"]  # forgotten, and known again
        other = rank.ask(1, 0)
        assert waiting.result(30)["quorum_id"] == other.result(30)["quorum_id"]
        assert "too_many_pings" not in stock.log() + lighthouse.log() + manager.log()
