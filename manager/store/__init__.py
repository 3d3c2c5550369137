"""The group's TCPStore, a child process: the only one of a daemon that loads torch."""
