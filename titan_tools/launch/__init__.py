"""Starting ranks: the launch record, the agent on each node, and errors of ranks."""
