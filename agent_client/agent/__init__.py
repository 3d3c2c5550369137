"""The Agent and its step."""
