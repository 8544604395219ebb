"""The ranks of a run: their machine, rendezvous, process groups, meshes, signals, and agreement."""
