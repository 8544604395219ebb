"""Tensors out of other tensors: the catalog, expressions over it, casts, and views that are read box by box."""
