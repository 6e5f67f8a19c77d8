"""`python -m finetune.check`: a data set read to its end before anything is trained on it."""
