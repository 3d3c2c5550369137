"""Stores of a lighthouse's records, a SQLite journal or etcd, and the election of the lighthouse that may write."""
