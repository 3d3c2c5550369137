"""Infrastructure shared by all our processes: event loop, sockets, logging, clients and servers.

It never imports torch.
"""
