"""Writing models in other formats."""
