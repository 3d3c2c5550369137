"""The state of a training process: its values, its encoding without pickle, its digests and its files."""
