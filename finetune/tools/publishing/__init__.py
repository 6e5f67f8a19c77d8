"""Sharing a model: its card, what of a run may be uploaded, and the upload to the Hugging Face Hub."""
