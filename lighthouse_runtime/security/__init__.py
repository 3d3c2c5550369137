"""Certificates and credentials: how a client knows its lighthouse, and a server its callers."""
