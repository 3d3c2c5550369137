"""TLS, tokens and access control, for clients and servers."""
