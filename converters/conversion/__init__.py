"""The steps of a conversion: plan, quantize, complete, copy, commit; what it needs and what it reports."""
