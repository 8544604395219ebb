"""Errors, names on disk, element types, boxes, sizes and threads, for every other package of converters."""
