"""Serve models over HTTP, as OpenAI's API for transcriptions."""
