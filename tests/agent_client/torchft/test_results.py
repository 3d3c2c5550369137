"""From the wire to torchft's classes: every field, and those that may be missing."""

from agent_client.torchft import QuorumResult, clients
from lighthouse_protocol.pb.torchft import torchft_pb2


def test_every_field_of_a_result() -> None:
    expected = QuorumResult(
        quorum_id=1,
        replica_rank=2,
        replica_world_size=3,
        recover_src_manager_address="http://m:1",
        recover_src_replica_rank=0,
        recover_dst_replica_ranks=[4, 5],
        store_address="s:1",
        max_step=6,
        max_replica_rank=0,
        max_world_size=7,
        heal=True,
        commit_failures=8,
        replica_ids=["a", "b"],
    )
    fields = {name: getattr(expected, name) for name in QuorumResult.__slots__}
    assert clients.quorum_result(torchft_pb2.ManagerQuorumResponse(**fields)) == expected


def test_who_does_not_heal_has_no_source_and_who_is_behind_no_rank() -> None:
    """0 is a rank; None is not."""
    missing = clients.quorum_result(torchft_pb2.ManagerQuorumResponse(replica_rank=1))
    assert (missing.recover_src_replica_rank, missing.max_replica_rank) == (None, None)
