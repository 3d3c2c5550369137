"""Tables and the live view of the CLI."""
