"""Manager of one replica group: it represents the group's ranks at the lighthouse."""
