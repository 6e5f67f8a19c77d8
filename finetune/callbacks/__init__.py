"""What watches, recovers, averages and shows a run; train.py registers them."""
