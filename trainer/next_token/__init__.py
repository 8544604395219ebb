"""Next-token prediction: what language models learn."""
