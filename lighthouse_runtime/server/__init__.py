"""gRPC server of the lighthouse and the manager."""
