"""Published peaks of torchtitan runs against the estimate: the rows, what was built otherwise then, the comparison."""
