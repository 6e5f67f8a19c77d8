"""NeMo's models and transformers' classes: the same networks in two formats."""
