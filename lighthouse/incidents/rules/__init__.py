"""When something is an incident, and what is done. No I/O, no clock."""
