"""Alignment of data sets: the job over their clips, and the formats of what is found."""
