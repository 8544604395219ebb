"""Pages that commands print and draw: conversions, differences, inspections, dry runs, curves of runs."""
