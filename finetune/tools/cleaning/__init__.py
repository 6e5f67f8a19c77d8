"""`python -m finetune.clean`: labels that do not fit their audio, found by a model."""
