"""Durable stores for the lighthouse's records (a SQLite journal or etcd), and leader election on etcd."""
