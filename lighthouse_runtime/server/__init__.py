"""The gRPC server of both daemons."""
