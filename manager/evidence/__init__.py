"""Evidence of a hang: what the processes of ranks are doing, from inside and from outside."""
