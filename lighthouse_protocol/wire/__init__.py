"""Conversion between messages and protobuf. No other package uses protobuf."""
