"""Conversion between the dataclasses in messages/, which do not depend on protobuf, and protobuf messages."""
