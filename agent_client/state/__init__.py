"""The state of a training process: which values it may contain, its encoding without pickle, its digests and files."""
