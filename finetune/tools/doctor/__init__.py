"""What `python -m finetune.doctor` looks at: one function a check, each giving lines with a state and a remedy."""
