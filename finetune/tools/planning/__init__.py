"""Where memory goes: the account of the tensors of a training step."""
