"""Checks of a checkpoint, of the source of a copy, and the locked folder of an unfinished output."""
