"""The replica group as one machine: what its ranks ask for, grants, votes, the session with the lighthouse."""
