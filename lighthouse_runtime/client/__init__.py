"""gRPC clients of both daemons: channels, calls, streams."""
