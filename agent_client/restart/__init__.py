"""In-process restart: after a failure of any rank of its run, a process runs its function again without exiting."""
