"""gRPC clients of both daemons: channels, calls and streams."""
