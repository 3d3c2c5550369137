"""Network addresses of this host, and bounded send queues."""
