"""Replica groups, their managers and a lighthouse: the quorums of docs/contributing/protocol.md."""
