"""A run before it starts: the job record, its checks, its folders, the first lines."""
