"""When to restart what, and how ranks are laid out. No I/O, no clock."""
