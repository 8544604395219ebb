"""The model that a folder holds: its numbers and fields, multimodal wrappers, multi-token prediction."""
