"""In-process restart: runs a function again in the same process after a failure of any rank of its run."""
