"""Conversion between the dataclasses in messages/ and protobuf messages."""
