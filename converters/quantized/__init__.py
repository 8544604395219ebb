"""Quantized weights: the schemes of fp8 and mxfp4, how codes find their scales, and encoders."""
