"""Native and foreign names: which naming a checkpoint follows, and views under other names."""
