"""What every other package of converters needs: errors, names on disk, element types, boxes, sizes, threads."""
