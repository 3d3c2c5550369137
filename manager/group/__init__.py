"""The replica group as one machine: who has asked, grants, votes, the session with the lighthouse."""
