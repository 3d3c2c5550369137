"""Runs the group's TCPStore in a child process, the only daemon process that loads torch."""
