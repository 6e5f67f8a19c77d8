"""The run file's schema, its merge with strategies and command line, and its checks."""
