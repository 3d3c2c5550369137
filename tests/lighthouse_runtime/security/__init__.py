"""Certificates and credentials."""
