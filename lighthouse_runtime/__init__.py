"""Infrastructure shared by all our processes: event loop, sockets, logging, clients and servers. No torch."""
