"""Infrastructure that every process of ours shares: event loop, sockets, logs, clients, servers. No torch."""
