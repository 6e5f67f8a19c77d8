"""Labels for audio that has none: transcripts whose confidence, calibrated on labelled clips, keeps a promise."""
