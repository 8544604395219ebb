"""The files of a checkpoint: names, JSON, the manifest and its digests, atomic writing, the hub's cache."""
