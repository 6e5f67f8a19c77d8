"""NeMo transducers and transformers' ParakeetForTDT: the same network in two formats."""
