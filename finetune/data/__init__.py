"""Sources, decoding, filters and the resumable stream of batches."""
