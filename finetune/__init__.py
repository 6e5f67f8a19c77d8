"""Fine-tune NVIDIA Parakeet-TDT speech recognisers within the memory that is there."""

__version__ = "0.1.0"
