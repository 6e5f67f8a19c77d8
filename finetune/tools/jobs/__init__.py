"""Sharded jobs over the clips of a data source, on worker processes or a Ray cluster; they go on where they ended."""
