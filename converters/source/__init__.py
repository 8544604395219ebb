"""Open a checkpoint of any tool: which files are read, which model it is, its weights under native names."""
