"""A store that several lighthouses share, in etcd, and which of them leads."""
