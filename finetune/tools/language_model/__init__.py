"""An n-gram language model of token sequences, made from texts."""
