"""gRPC clients of the lighthouse and the manager: channels, calls and streams."""
