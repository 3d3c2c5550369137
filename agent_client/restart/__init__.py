"""In-process restart: a function that is run again, in the same process, after a fault anywhere in its run."""
