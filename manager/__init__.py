"""Manager daemon of a replica group. It talks to the lighthouse on behalf of the group's ranks."""
