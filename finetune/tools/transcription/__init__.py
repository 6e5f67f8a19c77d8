"""What `python -m finetune.transcribe` makes of recognised words."""
