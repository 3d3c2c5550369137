"""Messages to protobuf and back. The only package that knows protobuf."""
