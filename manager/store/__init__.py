"""Runs the group's TCPStore in a child process, the only process of the daemons that loads torch."""
