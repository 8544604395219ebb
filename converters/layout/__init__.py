"""Meshes, pipeline stages, and the box of each tensor that a rank holds."""
